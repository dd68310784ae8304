// The log of the stand-ins, which libcudart.so.13 writes.
#pragma once

extern "C" void cuda_dry_trace(const char* name);  // writes "call NAME"
