/* To be preloaded: the wall clock jumps by up to hours, on and back, four times a second. Steady clocks go on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static int (*real)(clockid_t, struct timespec *);
__attribute__((constructor)) static void find(void) { real = dlsym(RTLD_NEXT, "clock_gettime"); }
static long jump(void) {
    struct timespec now;
    real(CLOCK_MONOTONIC, &now);
    long turn = now.tv_sec * 4 + now.tv_nsec / 250000000;
    return (turn * 7919 % 5 - 2) * 5000;
}
int clock_gettime(clockid_t id, struct timespec *out) {
    int status = real(id, out);
    if (!status && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) out->tv_sec += jump();
    return status;
}
int gettimeofday(struct timeval *out, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
