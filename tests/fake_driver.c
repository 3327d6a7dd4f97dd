/* A driver library that shows one GPU and can do nothing with it. */

int cuInit(unsigned flags) {
    return flags != 0;
}

int cuDeviceGetCount(int* count) {
    *count = 1;
    return 0;
}
