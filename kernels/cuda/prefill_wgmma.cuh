// d += a * b on Hopper's tensor cores: m64 (columns of the weight) x k16, a in registers, times the `T` tokens that a
// descriptor finds in shared memory. Asynchronous: between start_products and wait_for_products nobody touches d or a.
#pragma once
#include "number.cuh"

// Rows of 128 bytes with a swizzle of 128 bytes, eight rows 1024 bytes apart; 16 inputs further is 32 bytes further.
__device__ __forceinline__ u64 describe_tokens(u32 address) {
  return (address & 0x3ffff) >> 4 | u64{1} << 16 | u64{64} << 32 | u64{1} << 62;
}

__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>  // all but the last LEFT committed groups
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

template <class T>
struct IsFp16 { static constexpr bool value = false; };
template <>
struct IsFp16<Fp16> { static constexpr bool value = true; };

// One instruction per width: its sums are operands 0 .. T/2 - 1, a the next four, the descriptor the last.
template <int T>
struct Products;

#define SUMS(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8 SUMS(0)
#define SUMS_16 SUMS_8, SUMS(4)
#define SUMS_24 SUMS_16, SUMS(8)
#define SUMS_32 SUMS_24, SUMS(12)
#define SUMS_40 SUMS_32, SUMS(16)
#define SUMS_48 SUMS_40, SUMS(20)
#define SUMS_56 SUMS_48, SUMS(24)
#define SUMS_64 SUMS_56, SUMS(28)
#define SUMS_72 SUMS_64, SUMS(32)
#define SUMS_80 SUMS_72, SUMS(36)
#define SUMS_88 SUMS_80, SUMS(40)
#define SUMS_96 SUMS_88, SUMS(44)
#define SUMS_104 SUMS_96, SUMS(48)
#define SUMS_112 SUMS_104, SUMS(52)
#define SUMS_120 SUMS_112, SUMS(56)
#define SUMS_128 SUMS_120, SUMS(60)
#define SUMS_136 SUMS_128, SUMS(64)
#define SUMS_144 SUMS_136, SUMS(68)
#define SUMS_152 SUMS_144, SUMS(72)
#define SUMS_160 SUMS_152, SUMS(76)
#define NAMES_8 "%0,%1,%2,%3"
#define NAMES_16 NAMES_8 ",%4,%5,%6,%7"
#define NAMES_24 NAMES_16 ",%8,%9,%10,%11"
#define NAMES_32 NAMES_24 ",%12,%13,%14,%15"
#define NAMES_40 NAMES_32 ",%16,%17,%18,%19"
#define NAMES_48 NAMES_40 ",%20,%21,%22,%23"
#define NAMES_56 NAMES_48 ",%24,%25,%26,%27"
#define NAMES_64 NAMES_56 ",%28,%29,%30,%31"
#define NAMES_72 NAMES_64 ",%32,%33,%34,%35"
#define NAMES_80 NAMES_72 ",%36,%37,%38,%39"
#define NAMES_88 NAMES_80 ",%40,%41,%42,%43"
#define NAMES_96 NAMES_88 ",%44,%45,%46,%47"
#define NAMES_104 NAMES_96 ",%48,%49,%50,%51"
#define NAMES_112 NAMES_104 ",%52,%53,%54,%55"
#define NAMES_120 NAMES_112 ",%56,%57,%58,%59"
#define NAMES_128 NAMES_120 ",%60,%61,%62,%63"
#define NAMES_136 NAMES_128 ",%64,%65,%66,%67"
#define NAMES_144 NAMES_136 ",%68,%69,%70,%71"
#define NAMES_152 NAMES_144 ",%72,%73,%74,%75"
#define NAMES_160 NAMES_152 ",%76,%77,%78,%79"

#define INSTRUCTION(T, TYPES, a0, a1, a2, a3, b)                                                           \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #T "k16.f32." TYPES " {" NAMES_##T "}, {%" #a0 ",%" #a1 ",%" #a2 \
               ",%" #a3 "}, %" #b ", 1, 1, 1, 0;"                                                            \
               : SUMS_##T                                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens))
#define PRODUCTS(T, a0, a1, a2, a3, b)                                                          \
  template <>                                                                                   \
  struct Products<T> {                                                                          \
    template <class Type>                                                                       \
    static __device__ __forceinline__ void add(float (&d)[T / 2], const u32 (&a)[4], u64 tokens) { \
      if constexpr (IsFp16<Type>::value)                                                        \
        INSTRUCTION(T, "f16.f16", a0, a1, a2, a3, b);                                           \
      else                                                                                      \
        INSTRUCTION(T, "bf16.bf16", a0, a1, a2, a3, b);                                         \
    }                                                                                           \
  };

PRODUCTS(8, 4, 5, 6, 7, 8)
PRODUCTS(16, 8, 9, 10, 11, 12)
PRODUCTS(24, 12, 13, 14, 15, 16)
PRODUCTS(32, 16, 17, 18, 19, 20)
PRODUCTS(40, 20, 21, 22, 23, 24)
PRODUCTS(48, 24, 25, 26, 27, 28)
PRODUCTS(56, 28, 29, 30, 31, 32)
PRODUCTS(64, 32, 33, 34, 35, 36)
PRODUCTS(72, 36, 37, 38, 39, 40)
PRODUCTS(80, 40, 41, 42, 43, 44)
PRODUCTS(88, 44, 45, 46, 47, 48)
PRODUCTS(96, 48, 49, 50, 51, 52)
PRODUCTS(104, 52, 53, 54, 55, 56)
PRODUCTS(112, 56, 57, 58, 59, 60)
PRODUCTS(120, 60, 61, 62, 63, 64)
PRODUCTS(128, 64, 65, 66, 67, 68)
PRODUCTS(136, 68, 69, 70, 71, 72)
PRODUCTS(144, 72, 73, 74, 75, 76)
PRODUCTS(152, 76, 77, 78, 79, 80)
PRODUCTS(160, 80, 81, 82, 83, 84)
#undef PRODUCTS
#undef INSTRUCTION
