// A stand-in for libcudart.so.13: device memory is host memory, and kernels compute nothing.
//
// CUDA_DRY_CAPABILITY is the compute capability of the device, such as 90 for 9.0.
// The file CUDA_DRY_LOG gets a line for each of these calls:
//
//   allocate BYTES       memory of the device
//   copy KIND BYTES      KIND is a cudaMemcpyKind: 1 to the device, 2 to the host, 3 on the device
//   kernel NAME          a launch, the mangled name cut to 200 characters
//   host function        a function of the host that the stream calls
//   begin, end, replay   capture of a graph, and its launches
//   call NAME            a function of cuBLAS or cuDNN
//   forbidden NAME       a call that CUDA forbids during a capture, which fails as it does in CUDA
//
// Lines of calls during a capture begin with "captured ".

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "trace.h"

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMemory = 80ull << 30;
constexpr int kMultiprocessors = 132;
// Captures take at least this long, so that a forbidden call of another thread falls into one.
constexpr int kCaptureMicroseconds = 5000;

std::recursive_mutex mutex;
std::set<cudaStream_t> capturing;

// The names of kernels, by the address of their host functions. Libraries register kernels before
// the variables of this file are initialized.
std::unordered_map<const void*, std::string>& kernel_names() {
  static std::unordered_map<const void*, std::string> names;
  return names;
}

void log(const char* format, ...) {
  static const char* path = getenv("CUDA_DRY_LOG");
  static FILE* file = path ? fopen(path, "a") : nullptr;
  if (!file) return;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (!capturing.empty()) fputs("captured ", file);
  va_list arguments;
  va_start(arguments, format);
  vfprintf(file, format, arguments);
  va_end(arguments);
  fputc('\n', file);
  fflush(file);
}

// Any capture forbids calls that wait for the device, allocate, or use the default stream.
cudaError_t check_capture(const char* name) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (capturing.empty()) return cudaSuccess;
  log("forbidden %s", name);
  return cudaErrorStreamCaptureUnsupported;
}

int capability() {
  static const char* value = getenv("CUDA_DRY_CAPABILITY");
  return value ? atoi(value) : 90;
}

size_t shared_memory_per_block() {
  switch (capability()) {
    case 75: return 64 << 10;
    case 80: return 163 << 10;
    case 90: return 227 << 10;
    default: return 99 << 10;
  }
}

size_t shared_memory_per_multiprocessor() { return shared_memory_per_block() + 1024; }

// Pages are reserved without memory until they are written. The first page holds the size.
void* reserve(size_t bytes) {
  size_t size = kPage + (bytes + kPage - 1) / kPage * kPage;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  auto* pages = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0));
  *reinterpret_cast<size_t*>(pages) = size;
  return pages + kPage;
}

void release(void* memory) {
  if (!memory) return;
  auto* pages = static_cast<char*>(memory) - kPage;
  munmap(pages, *reinterpret_cast<size_t*>(pages));
}

template <typename Handle>
cudaError_t make(Handle* handle) {
  *handle = reinterpret_cast<Handle>(calloc(1, 64));
  return cudaSuccess;
}

cudaError_t launch(const void* function) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  log("kernel %.200s", kernel_names()[function].c_str());
  return cudaSuccess;
}

}  // namespace

extern "C" {

void cuda_dry_trace(const char* name) { log("call %s", name); }

// ------------------------------------------------------------------------------ kernels of a binary

void** __cudaRegisterFatBinary(void*) { return static_cast<void**>(calloc(1, sizeof(void*))); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  kernel_names()[host] = name;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local std::vector<Configuration> configurations;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(kernel);
}

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(function);
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t,
                                        cudaStream_t) {
  return launch(function);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
  return launch(function);
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*, cudaJitOption*, void**,
                                unsigned, cudaLibraryOption*, void**, unsigned) {
  return make(library);
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char* name) {
  make(kernel);
  std::lock_guard<std::recursive_mutex> lock(mutex);
  kernel_names()[*kernel] = name;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = capability();
  attributes->maxDynamicSharedSizeBytes = static_cast<int>(shared_memory_per_block());
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

// ---------------------------------------------------------------------------------------- the device

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *available = *total = kMemory;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* device, int) {
  *device = {};
  strcpy(device->name, "stand-in");
  device->totalGlobalMem = kMemory;
  device->major = capability() / 10;
  device->minor = capability() % 10;
  device->multiProcessorCount = kMultiprocessors;
  device->warpSize = 32;
  device->regsPerBlock = device->regsPerMultiprocessor = 65536;
  device->maxThreadsPerBlock = 1024;
  device->maxThreadsPerMultiProcessor = capability() == 75 ? 1024 : 2048;
  device->maxThreadsDim[0] = device->maxThreadsDim[1] = 1024;
  device->maxThreadsDim[2] = 64;
  device->maxGridSize[0] = 2147483647;
  device->maxGridSize[1] = device->maxGridSize[2] = 65535;
  device->sharedMemPerBlock = 48 << 10;
  device->sharedMemPerBlockOptin = shared_memory_per_block();
  device->sharedMemPerMultiprocessor = shared_memory_per_multiprocessor();
  device->l2CacheSize = 50 << 20;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  cudaDeviceProp device;
  cudaGetDeviceProperties(&device, 0);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = device.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = device.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = device.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = device.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX: *value = device.maxThreadsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = device.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = device.maxGridSize[1]; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = device.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = device.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = device.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = device.sharedMemPerMultiprocessor;
      break;
    case cudaDevAttrL2CacheSize: *value = device.l2CacheSize; break;
    default: *value = 1;  // flags of what a device can do
  }
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t error) {
  return error ? "cudaErrorStreamCaptureUnsupported" : "cudaSuccess";
}

const char* cudaGetErrorString(cudaError_t error) {
  return error ? "operation not permitted when stream is capturing" : "no error";
}

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// -------------------------------------------------------------------------------------------- memory

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (cudaError_t error = check_capture("cudaMalloc")) return error;
  log("allocate %zu", bytes);
  *memory = reserve(bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  if (cudaError_t error = check_capture("cudaFree")) return error;
  release(memory);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  *memory = reserve(bytes);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return cudaMallocHost(memory, bytes);
}

cudaError_t cudaFreeHost(void* memory) {
  release(memory);
  return cudaSuccess;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) { return make(pool); }

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  memset(value, 0, sizeof(size_t));
  return cudaSuccess;
}

cudaError_t cudaMallocFromPoolAsync(void** memory, size_t bytes, cudaMemPool_t, cudaStream_t) {
  log("allocate %zu", bytes);
  *memory = reserve(bytes);
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* memory, cudaStream_t) {
  release(memory);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  log("copy %d %zu", kind, bytes);
  memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (cudaError_t error = check_capture("cudaMemcpy")) return error;
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t) {
  log("copy %d %zu", kind, width * height);
  for (size_t row = 0; row < height; row++) {
    memmove(static_cast<char*>(to) + row * to_pitch,
            static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpyFromSymbol(void* to, const void*, size_t bytes, size_t, cudaMemcpyKind) {
  if (cudaError_t error = check_capture("cudaMemcpyFromSymbol")) return error;
  memset(to, 0, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  memset(memory, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  if (cudaError_t error = check_capture("cudaMemset")) return error;
  return cudaMemsetAsync(memory, value, bytes, nullptr);
}

// ----------------------------------------------------------------------- streams, graphs and events

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return make(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return make(stream); }
cudaError_t cudaDeviceSynchronize() { return check_capture("cudaDeviceSynchronize"); }

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return capturing.count(stream) ? check_capture("cudaStreamSynchronize") : cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  log("host function");
  function(data);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    log("begin");
    capturing.insert(stream);
  }
  usleep(kCaptureMicroseconds);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  capturing.erase(stream);
  log("end");
  return make(graph);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  *status = capturing.count(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t, unsigned long long) {
  return make(executable);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  log("replay");
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return make(event); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make(event); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return check_capture("cudaEventSynchronize"); }

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}

}  // extern "C"
