// The functions of libcudnn.so.9 that return more than a status. Plans of attention are refused, so
// that a graph that needs one fails.

#include <cstddef>
#include <cstdlib>

namespace {

constexpr int kNotSupported = 3000;  // CUDNN_STATUS_NOT_SUPPORTED
int make(void** handle) { return *handle = calloc(1, 64), 0; }

}  // namespace

extern "C" {

size_t cudnnGetVersion() { return 91400; }
size_t cudnnGetCudartVersion() { return 13000; }
const char* cudnnGetErrorString(int) { return "the stand-in of cuDNN has no plans"; }

void cudnnGetLastErrorString(char* message, size_t size) {
  if (size) *message = 0;
}

int cudnnCreate(void** handle) { return make(handle); }
int cudnnCreateTensorDescriptor(void** handle) { return make(handle); }
int cudnnCreateReduceTensorDescriptor(void** handle) { return make(handle); }
int cudnnGetStream(void*, void** stream) { return *stream = nullptr, 0; }

int cudnnGetReductionIndicesSize(void*, void*, void*, void*, size_t* size) { return *size = 1024, 0; }

int cudnnGetReductionWorkspaceSize(void*, void*, void*, void*, size_t* size) {
  return *size = 1024, 0;
}

int cudnnBackendCreateDescriptor(int, void**) { return kNotSupported; }

}  // extern "C"
