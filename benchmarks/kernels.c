/* What the kernels are held against: plain loops, as gcc -O3 -march=native makes them. And the clockwork that calls
   all contenders alike, from C, so that small buffers measure memory and not Python. */
#include <stdint.h>
#include <string.h>

typedef int64_t word;
typedef int (*function)(word, word, word, word, word, word, word);
typedef struct { function f; word arguments[7]; } call;

void repeat(const call *calls, long count, long repeats) {
    for (long r = 0; r < repeats; r++)
        for (long c = 0; c < count; c++) {
            const word *a = calls[c].arguments;
            calls[c].f(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
        }
}

static inline float wide16(_Float16 x) { return (float)x; }
static inline _Float16 half16(float x) { return (_Float16)x; }
static inline float wide_b(uint16_t x) { uint32_t b = (uint32_t)x << 16; float f; memcpy(&f, &b, 4); return f; }
static inline uint16_t half_b(float f) {
    uint32_t b; memcpy(&b, &f, 4);
    return (b & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
#define ID(x) (x)

/* x0 … x7: the inputs; the first SUMn of them are added. */
#define SUM2(W) W(x0[i]) + W(x1[i])
#define SUM3(W) SUM2(W) + W(x2[i])
#define SUM4(W) SUM3(W) + W(x3[i])
#define SUM5(W) SUM4(W) + W(x4[i])
#define SUM6(W) SUM5(W) + W(x5[i])
#define SUM7(W) SUM6(W) + W(x6[i])
#define SUM8(W) SUM7(W) + W(x7[i])
#define INPUTS(T) const T *x0 = t[0], *x1 = t[1], *x2 = t[2], *x3 = t[3], *x4 = t[4], *x5 = t[5], *x6 = t[6], *x7 = t[7]
#define LOOP(NAME, T, W, H, SUM) void NAME(void **t, void *to, long count) { \
    T *out = to; INPUTS(T); (void)x2; (void)x3; (void)x4; (void)x5; (void)x6; (void)x7; \
    _Pragma("GCC ivdep") for (long i = 0; i < count; i++) out[i] = H(SUM(W)); }
#define LOOPS(NAME, T, W, H) \
    LOOP(NAME##_2, T, W, H, SUM2) LOOP(NAME##_3, T, W, H, SUM3) LOOP(NAME##_4, T, W, H, SUM4) \
    LOOP(NAME##_5, T, W, H, SUM5) LOOP(NAME##_6, T, W, H, SUM6) LOOP(NAME##_7, T, W, H, SUM7) \
    LOOP(NAME##_8, T, W, H, SUM8)

LOOPS(float32, float, ID, ID)
LOOPS(float64, double, ID, ID)
LOOPS(int32, uint32_t, ID, ID)
LOOPS(int64, uint64_t, ID, ID)
LOOPS(float16, _Float16, wide16, half16)
LOOPS(bfloat16, uint16_t, wide_b, half_b)
