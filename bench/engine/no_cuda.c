/* A libcuda.so.1 that does nothing and says all went well, for timing launches without a GPU.
   It answers what Triton's driver asks; a Hopper's numbers where it wants numbers. */

typedef unsigned long long u64;

enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, SHARED_MEMORY = 232448 };

int cuInit(int flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == CAPABILITY_MAJOR ? 9 : attribute == CAPABILITY_MINOR ? 0 : SHARED_MEMORY;
  return 0;
}
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(u64 *value, int limit) { *value = 0; return 0; }
int cuCtxSetLimit(int limit, u64 value) { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "?"; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)2; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  static u64 next = 4096;
  *function = (void *)(next += 16);
  return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : 0; /* threads of a block; registers and spills */
  return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuOccupancyMaxActiveClusters(int *count, void *function, void *config) { *count = 1; return 0; }
int cuPointerGetAttribute(u64 *address, int attribute, u64 pointer) { *address = pointer; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }

int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) {
  return 0;
}
