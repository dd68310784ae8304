// The functions of libcublas.so.13 that return more than a status.

#include <cstdlib>

extern "C" {

int cublasCreate_v2(void** handle) { return *handle = calloc(1, 64), 0; }
int cublasGetMathMode(void*, int* mode) { return *mode = 0, 0; }
const char* cublasGetStatusName(int) { return "stand-in"; }
const char* cublasGetStatusString(int) { return "stand-in"; }

}  // extern "C"
