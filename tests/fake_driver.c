/* A driver library that shows devices and can do nothing with them. What it says of them may be set by -D. */

#include <stddef.h>
#include <string.h>

#ifndef CUDA_VERSION
#define CUDA_VERSION 13000
#endif
#ifndef STATUS
#define STATUS 0
#endif
#ifndef NUM_DEVICES
#define NUM_DEVICES 1
#endif
#ifndef MAJOR
#define MAJOR 8
#endif

int cuDriverGetVersion(int* version) {
    *version = CUDA_VERSION;
    return 0;
}

int cuInit(unsigned flags) {
    return flags != 0 ? 1 : STATUS;
}

int cuDeviceGetCount(int* count) {
    *count = NUM_DEVICES;
    return 0;
}

int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return 0;
}

int cuDeviceGetName(char* name, int size, int device) {
    strncpy(name, device == 0 ? "Example GPU" : "Another GPU", size);
    return 0;
}

int cuDeviceTotalMem_v2(size_t* size, int device) {
    *size = (size_t)(device + 8) << 30;
    return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
    *value = attribute == 75 ? MAJOR : 6;
    return device < 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = 0;
    return device != 0;
}
