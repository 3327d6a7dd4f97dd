/* A driver library that shows one GPU and can do nothing with it. */

int cuInit(unsigned flags) {
    return flags != 0;
}

int cuDeviceGetCount(int* count) {
    *count = 1;
    return 0;
}

int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = 0;
    return device != 0;
}
