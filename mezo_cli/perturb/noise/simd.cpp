// The kernels of noise/kernels.py and noise/rounding.py for CPUs, bitwise identical to their tensor operations.
//
// One source for every instruction set: GCC's and Clang's vector types of the register's size, and intrinsics for the
// product of two 32-bit numbers, the xor of three numbers and the lookup, where they were measured to take less time.
// compiled.py compiles it; tests/perturb/simd_vectors.cpp compares its results with stored ones, also for other machines.
#include <cstdint>
#include <cstring>

#if defined(MEZO_GENERIC)
constexpr int BYTES = 16;
#elif defined(__AVX512F__)
#include <immintrin.h>
#define MEZO_AVX512
constexpr int BYTES = 64;
#elif defined(__AVX2__)
#include <immintrin.h>
#define MEZO_AVX2
constexpr int BYTES = 32;
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define MEZO_NEON
constexpr int BYTES = 16;
#else
constexpr int BYTES = 16;
#endif

#define INLINE __attribute__((always_inline)) inline

namespace {

constexpr int LANES = 32;        // as in kernels.py
constexpr int WIDTH = BYTES / 4;  // 32-bit numbers in a vector
constexpr int VECTORS = LANES / WIDTH;
constexpr int BLOCK_ROWS = 8;  // of LANES elements: a tile of gaussian noise, 1/16 of one of rademacher noise
constexpr int BLOCK = BLOCK_ROWS * LANES;
constexpr int ROUNDS = 10;
constexpr int AT_ONCE = 2;  // vectors of lanes whose words are computed at once
constexpr int64_t SERIAL = 128;  // tiles of a call that one thread takes: more threads would cost more than they save

typedef uint64_t u64v __attribute__((vector_size(BYTES)));
typedef uint32_t u32v __attribute__((vector_size(BYTES)));
typedef int32_t i32v __attribute__((vector_size(BYTES)));
typedef float f32v __attribute__((vector_size(BYTES)));
typedef double f64v __attribute__((vector_size(BYTES)));
typedef uint16_t u16v __attribute__((vector_size(BYTES / 2)));  // as many numbers as a u32v
typedef float f32half __attribute__((vector_size(BYTES / 2)));  // as many numbers as an f64v

constexpr uint32_t SIGN = 0x80000000u, INFINITE = 0x7F800000u;

struct Bfloat16 {  // the upper half of a float32
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

INLINE f32v all(float value) { return value - f32v{}; }  // not +: -0 stays -0

INLINE f32v load(const float* from) {
  f32v value;
  memcpy(&value, from, sizeof value);
  return value;
}

// --- what the instruction sets have different instructions for ---

// The product of the low halves.
INLINE u64v multiply(u64v value, uint32_t factor) {
#if defined(MEZO_AVX512)
  return (u64v)_mm512_mul_epu32((__m512i)value, _mm512_set1_epi64(factor));
#elif defined(MEZO_AVX2)
  return (u64v)_mm256_mul_epu32((__m256i)value, _mm256_set1_epi64x(factor));
#elif defined(MEZO_NEON)
  return (u64v)vmull_u32(vmovn_u64((uint64x2_t)value), vdup_n_u32(factor));
#else
  return (value & 0xFFFFFFFFu) * factor;
#endif
}

INLINE u64v xor_of(u64v a, u64v b, u64v c) {
#if defined(MEZO_AVX512)
  return (u64v)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
#else
  return a ^ b ^ c;
#endif
}

// `value` with its sign flipped where the uppermost bit of `code` is set.
INLINE f32v flip_sign(f32v value, u32v code) {
#if defined(MEZO_AVX512)
  return (f32v)_mm512_ternarylogic_epi32((__m512i)value, (__m512i)code, _mm512_set1_epi32((int)SIGN), 0x78);
#else
  return (f32v)((u32v)value ^ (code & SIGN));
#endif
}

// Entry index[i] of the table for each i. With AVX2 its instruction took as long as one load after another (Zen 5).
INLINE void lookup(const float* table, const uint32_t* index, float* entries) {
#if defined(MEZO_AVX512)
  for (int i = 0; i < BLOCK; i += WIDTH)
    _mm512_storeu_ps(entries + i, _mm512_i32gather_ps(_mm512_loadu_si512(index + i), table, sizeof(float)));
#else
  for (int i = 0; i < BLOCK; i++) entries[i] = table[index[i]];
#endif
}

// --- the random words: kernels.py ---

// The key of every round.
struct Keys {
  u64v first[ROUNDS], second[ROUNDS];
  uint64_t of = ~uint64_t{0};

  Keys() { set(0); }

  void set(uint64_t key) {
    if (key == of) return;
    of = key;
    for (uint32_t r = 0; r < ROUNDS; r++) {
      first[r] = uint64_t{static_cast<uint32_t>(key) + 0x9E3779B9u * r} + u64v{};
      second[r] = uint64_t{static_cast<uint32_t>(key >> 32) + 0xBB67AE85u * r} + u64v{};
    }
  }
};

// The words of a tile: word k of lanes WIDTH v to WIDTH (v + 1) - 1 is words[k][v].
struct Words {
  u32v words[4][VECTORS];

  // In a function of its own, and not in every kernel: the compiler takes long for it.
  __attribute__((noinline)) void draw(int64_t tile, const Keys& keys, const int64_t* step_sample) {
    u64v even;  // lanes 0, 2, 4 ...
    for (int i = 0; i < WIDTH / 2; i++) even[i] = 2 * i;
    even += static_cast<uint64_t>(tile) * LANES;
#pragma GCC unroll 1
    for (int v = 0; v < VECTORS; v += AT_ONCE) {
      u64v c0[2 * AT_ONCE], c1[2 * AT_ONCE], c2[2 * AT_ONCE], c3[2 * AT_ONCE];  // what the high halves hold is ignored
#pragma GCC unroll 8
      for (int i = 0; i < 2 * AT_ONCE; i++) {
        c0[i] = even + static_cast<uint64_t>((v + i / 2) * WIDTH + i % 2);
        c1[i] = c0[i] >> 32;
        c2[i] = static_cast<uint64_t>(step_sample[0]) + u64v{};
        c3[i] = static_cast<uint64_t>(step_sample[1]) + u64v{};
      }
#pragma GCC unroll 10
      for (int r = 0; r < ROUNDS; r++) {
#pragma GCC unroll 8
        for (int i = 0; i < 2 * AT_ONCE; i++) {
          const u64v p0 = multiply(c0[i], 0xD2511F53u), p1 = multiply(c2[i], 0xCD9E8D57u);
          c0[i] = xor_of(p1 >> 32, c1[i], keys.first[r]);
          c1[i] = p1;
          c2[i] = xor_of(p0 >> 32, c3[i], keys.second[r]);
          c3[i] = p0;
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < AT_ONCE; i++) {
        words[0][v + i] = in_order(c0[2 * i], c0[2 * i + 1]);
        words[1][v + i] = in_order(c1[2 * i], c1[2 * i + 1]);
        words[2][v + i] = in_order(c2[2 * i], c2[2 * i + 1]);
        words[3][v + i] = in_order(c3[2 * i], c3[2 * i + 1]);
      }
    }
  }

  // The lower or the upper half of a word: the bits that round row `row` of a block.
  INLINE u32v half(int row, int v) const {
    return row % 2 == 0 ? words[row / 2][v] & 0xFFFFu : words[row / 2][v] >> 16;
  }

  static INLINE u32v in_order(u64v even, u64v odd) { return (u32v)((even & 0xFFFFFFFFu) | (odd << 32)); }
};

// --- c z ---

struct Block {
  f32v cz[BLOCK / WIDTH];
};

// By 16 bits an entry of the table scaled by c. Entry 65535 - i is entry i with its sign flipped, so half of the table
// is enough, and more of it stays in the cache.
void draw_gaussian(const Words& tile, const float* scaled, Block& block) {
  u32v codes[BLOCK / WIDTH];  // in the upper 16 bits
  for (int k = 0; k < 4; k++)
    for (int v = 0; v < VECTORS; v++) {
      codes[2 * k * VECTORS + v] = tile.words[k][v] << 16;
      codes[(2 * k + 1) * VECTORS + v] = tile.words[k][v];
    }
  uint32_t index[BLOCK];  // in the lower half
  for (int i = 0; i < BLOCK / WIDTH; i++) {
    const u32v lower = (codes[i] ^ (u32v)((i32v)codes[i] >> 31)) >> 16;
    memcpy(index + i * WIDTH, &lower, BYTES);
  }
  float entries[BLOCK];
  lookup(scaled, index, entries);
  for (int i = 0; i < BLOCK / WIDTH; i++) block.cz[i] = flip_sign(load(entries + i * WIDTH), codes[i]);
}

// +c for a set bit, else -c.
void draw_rademacher(const Words& tile, int64_t number, const float* c, Block& block) {
  const f32v minus = all(-*c);
  const int first = number % 4 * BLOCK_ROWS;  // row of the word; a word serves 4 blocks
  for (int v = 0; v < VECTORS; v++) {
    const u32v word = tile.words[number / 4][v] << (24 - first);
    for (int row = 0; row < BLOCK_ROWS; row++)
      block.cz[row * VECTORS + v] = flip_sign(minus, word << (BLOCK_ROWS - 1 - row));
  }
}

// --- theta in memory ---

INLINE f32v choose(i32v condition, f32v yes, f32v no) {
  return (f32v)(((i32v)yes & condition) | ((i32v)no & ~condition));
}

INLINE u32v load_bits(const void* from) {
  u16v bits;
  memcpy(&bits, from, sizeof bits);
  return __builtin_convertvector(bits, u32v);
}

INLINE f32v load(const Bfloat16* from) { return (f32v)(load_bits(from) << 16); }

INLINE f32v load(const Float16* from) {
  const u32v bits = load_bits(from);
  const f32v finite = (f32v)((bits & 0x7FFFu) << 13) * 0x1p112f;  // exact, also for subnormal numbers
  const u32v infinite = (u32v)(finite >= 65536.0f) & INFINITE;    // or nan
  return (f32v)((u32v)finite | infinite | (bits & 0x8000u) << 16);
}

INLINE void store(float* out, f32v value) { memcpy(out, &value, sizeof value); }

INLINE void store_bits(void* out, u32v bits) {
  const u16v halves = __builtin_convertvector(bits, u16v);
  memcpy(out, &halves, sizeof halves);
}

// Store `value`, to whose bits `carry` is added first; a nan stays one.
INLINE void store_upper(Bfloat16* out, f32v value, u32v carry) {
  const u32v nan = (u32v)(value != value);
  store_bits(out, (((u32v)value + carry) >> 16 & ~nan) | (nan & 0x7FC0u));
}

// To the nearest, ties to even.
INLINE void store(Bfloat16* out, f32v value) { store_upper(out, value, 0x7FFFu + ((u32v)value >> 16 & 1u)); }

INLINE void store(Float16* out, f32v value) {
  const u32v bits = (u32v)value & ~SIGN;
  const u32v normal = (bits + 0xFFFu + (bits >> 13 & 1u) - (112u << 23)) >> 13;
  const u32v small = (u32v)((f32v)bits + 0.5f) - 0x3F000000u;  // the last bit of a number from 0.5 to 1 counts 2^-24
  const u32v is_small = (u32v)((f32v)bits < 0x1p-14f), is_large = (u32v)((f32v)bits >= 65520.0f);
  const u32v nan = (u32v)(value != value);
  u32v half = (small & is_small) | (normal & ~is_small & ~is_large & ~nan) | (is_large & 0x7C00u) | (nan & 0x7E00u);
  store_bits(out, half | ((u32v)value >> 16 & 0x8000u));
}

// --- stochastic rounding: rounding.py ---

INLINE void store_rounded(float* out, f32v value, u32v) { store(out, value); }

INLINE void store_rounded(Bfloat16* out, f32v value, u32v random) { store_upper(out, value, random); }

INLINE void store_rounded(Float16* out, f32v value, u32v random) {
  const f32v size = (f32v)((u32v)value & ~SIGN);
  const f32v normal = (f32v)(((u32v)size + (random >> 3)) & 0xFFFFE000u);  // a nan stays one; from 65,536 on it is inf
  const i32v is_small = size < 0x1p-14f;
  const f32v steps = choose(is_small, size, f32v{}) * 0x1p24f;
  const f32v whole = __builtin_convertvector(__builtin_convertvector(steps, i32v), f32v);
  const i32v up = (steps - whole) * 65536.0f > __builtin_convertvector((i32v)random, f32v);
  const f32v small = (whole - __builtin_convertvector(up, f32v)) * 0x1p-24f;
  store(out, (f32v)((u32v)choose(is_small, small, choose(value == value, normal, value)) | ((u32v)value & SIGN)));
}

// --- new values from old ones and c z ---

// use(value, term) in float64, where `use` multiplies by a float32: its products are exact, contracted or not.
template <class Use>
INLINE f32v in_float64(f32v value, f32v term, const Use& use) {
#if defined(MEZO_AVX512)
  const auto half = [&](__m256 v, __m256 t) {
    return _mm512_cvtpd_ps((__m512d)use((f64v)_mm512_cvtps_pd(v), (f64v)_mm512_cvtps_pd(t)));
  };
  const __m256 low = half(_mm512_castps512_ps256(value), _mm512_castps512_ps256(term));
  const __m256 high = half(_mm512_extractf32x8_ps(value, 1), _mm512_extractf32x8_ps(term, 1));
  return (f32v)_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
#elif defined(MEZO_AVX2)
  const auto half = [&](__m128 v, __m128 t) {
    return _mm256_cvtpd_ps((__m256d)use((f64v)_mm256_cvtps_pd(v), (f64v)_mm256_cvtps_pd(t)));
  };
  const __m128 low = half(_mm256_castps256_ps128(value), _mm256_castps256_ps128(term));
  const __m128 high = half(_mm256_extractf128_ps(value, 1), _mm256_extractf128_ps(term, 1));
  return (f32v)_mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
#else
  f32half v[2], t[2];
  memcpy(v, &value, sizeof value);
  memcpy(t, &term, sizeof term);
  for (int h = 0; h < 2; h++)
    v[h] = __builtin_convertvector(
        use(__builtin_convertvector(v[h], f64v), __builtin_convertvector(t[h], f64v)), f32half);
  memcpy(&value, v, sizeof value);
  return value;
#endif
}

// --- the kernels ---

enum Kind { GAUSSIAN, RADEMACHER, NONE };
enum Type { FLOAT32, BFLOAT16, FLOAT16 };
enum Operation { PERTURB, ADD, DECAY, SHRINK, ROUND_BFLOAT16, ROUND_FLOAT16 };

// A call of a kernel over `count` tiles of `blocks` blocks. The tensors are in the order of the kernel's parameters.
struct Call {
  int kind, operation, theta_type, out_type;
  int arrays;  // that have elements
  int64_t blocks, count, threads;
  void* const* tensors;

  template <class T>
  T* array(int index) const {
    return static_cast<T*>(tensors[index]);
  }

  template <class T>
  const T* input(int index) const {
    return array<const T>(arrays + index);
  }
};

// Ask for the elements of a block that comes soon: between the lookups the processor itself does not foresee them.
INLINE void prefetch(const Call& call, int64_t block) {
  constexpr int AHEAD = 4;
  for (int a = 0; a < call.arrays; a++) {
    const int size = (a == 0 ? call.theta_type : call.out_type) == FLOAT32 ? 4 : 2;
    const char* elements = call.array<char>(a) + (block + AHEAD) * BLOCK * size;
    for (int i = 0; i < BLOCK * size; i += 64) __builtin_prefetch(elements + i);
  }
}

// Call use(its first element, c z, random words for rounding) for each block of each tile.
template <class Use>
INLINE void for_each_block(const Call& call, const int64_t* rounding, const Use& use) {
  const int32_t* numbers = call.input<int32_t>(0);
  const int64_t *of_tiles = call.input<int64_t>(1), *step_sample = call.input<int64_t>(2);
  const float* scaled = call.kind == NONE ? nullptr : call.input<float>(3);
#pragma omp parallel num_threads(call.threads) if (call.threads > 1 && call.count > SERIAL)
  {
    Keys keys;
    Words tile, random;
    Block block;
#pragma omp for
    for (int64_t t = 0; t < call.count; t++) {
      keys.set(of_tiles[t]);
      if (call.kind != NONE) tile.draw(numbers[t], keys, step_sample);
      for (int64_t b = 0; b < call.blocks; b++) {
        if (call.kind == GAUSSIAN) {
          prefetch(call, t * call.blocks + b);
          draw_gaussian(tile, scaled, block);
        }
        if (call.kind == RADEMACHER) draw_rademacher(tile, b, scaled, block);
        if (rounding != nullptr) random.draw(numbers[t] * call.blocks + b, keys, rounding);
        use((t * call.blocks + b) * BLOCK, block.cz, random);
      }
    }
  }
}

template <class Theta, class Out>
void perturb(const Call& call) {
  const Theta* theta = call.array<Theta>(0);
  Out *out = call.array<Out>(1), *minus = call.arrays == 3 ? call.array<Out>(2) : nullptr;
  for_each_block(call, nullptr, [=](int64_t start, const f32v* cz, const Words&) {
    if (minus != nullptr)
      for (int i = 0; i < BLOCK / WIDTH; i++) store(minus + start + i * WIDTH, load(theta + start + i * WIDTH) - cz[i]);
    for (int i = 0; i < BLOCK / WIDTH; i++) store(out + start + i * WIDTH, load(theta + start + i * WIDTH) + cz[i]);
  });
}

// theta <- update(theta, c z), rounded stochastically if it is stored in half precision.
template <class Theta, class Update>
void update(const Call& call, const int64_t* rounding, const Update& update) {
  Theta* theta = call.array<Theta>(0);
  for_each_block(call, rounding, [=](int64_t start, const f32v* cz, const Words& random) {
    for (int row = 0; row < BLOCK_ROWS; row++)
      for (int v = 0; v < VECTORS; v++) {
        const int i = row * VECTORS + v;
        Theta* at = theta + start + i * WIDTH;
        store_rounded(at, update(load(at), cz[i]), random.half(row, v));
      }
  });
}

// Round float32 values to those of a half-precision type.
template <class Stored>
void round_values(const Call& call) {
  float* values = call.array<float>(0);
  for_each_block(call, call.input<int64_t>(2), [=](int64_t start, const f32v*, const Words& random) {
    for (int row = 0; row < BLOCK_ROWS; row++)
      for (int v = 0; v < VECTORS; v++) {
        float* at = values + start + (row * VECTORS + v) * WIDTH;
        Stored rounded[WIDTH];
        store_rounded(rounded, load(at), random.half(row, v));
        store(at, load(rounded));
      }
  });
}

// --- from numbers to types ---

template <class Theta>
void run_perturb(const Call& call) {
  if (call.out_type == FLOAT32) perturb<Theta, float>(call);
  if (call.out_type == BFLOAT16) perturb<Theta, Bfloat16>(call);
  if (call.out_type == FLOAT16) perturb<Theta, Float16>(call);
}

template <class Theta>
void run(const Call& call) {
  const bool rounds = call.theta_type != FLOAT32;
  const int64_t* rounding = rounds ? call.input<int64_t>(4) : nullptr;
  if (call.operation == PERTURB) run_perturb<Theta>(call);
  if (call.operation == ADD) update<Theta>(call, rounding, [](f32v value, f32v cz) { return value + cz; });
  if (call.operation == DECAY) {
    const double factor = *call.input<double>(rounds ? 5 : 4);
    update<Theta>(call, rounding, [=](f32v value, f32v cz) {
      return in_float64(value, cz, [=](f64v v, f64v t) { return v * factor + t; });
    });
  }
  if (call.operation == SHRINK) {
    const double fraction = *call.input<double>(rounds ? 5 : 4);
    update<Theta>(call, rounding, [=](f32v value, f32v cz) {
      return in_float64(value, cz, [=](f64v v, f64v t) { return v - v * fraction + t; });
    });
  }
}

}  // namespace

// Run a kernel. `tensors` are those of its call in Python, of which the first `arrays` have elements.
extern "C" void mezo_noise(
    int kind, int operation, int theta_type, int out_type, int arrays, int64_t blocks, int64_t count, int64_t threads,
    void* const* tensors) {
  const Call call = {kind, operation, theta_type, out_type, arrays, blocks, count, threads, tensors};
  if (operation == ROUND_BFLOAT16) return round_values<Bfloat16>(call);
  if (operation == ROUND_FLOAT16) return round_values<Float16>(call);
  if (theta_type == FLOAT32) run<float>(call);
  if (theta_type == BFLOAT16) run<Bfloat16>(call);
  if (theta_type == FLOAT16) run<Float16>(call);
}
