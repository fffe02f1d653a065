// The kernels of noise/kernels.py for CPUs with AVX-512: bitwise identical, in about half the time of compiled tensor
// operations. These look up each element of z alone, and have no instruction for a product of two 32-bit numbers.
// avx512.py appends the entry point, which calls one of the functions at the end.
#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int64_t LANES = 32;    // as in kernels.py
constexpr int64_t SERIAL = 128;  // tiles of a call that one thread takes: more threads would cost more than they save

// The random words of a tile: word k of lanes 16 h to 16 h + 15 is words[k][h]. See philox.py and kernels.py.
struct Words {
  __m512i words[4][2];

  __attribute__((always_inline)) Words(int64_t tile, uint64_t key, const int64_t* step_sample) {
    const __m512i multiplier0 = _mm512_set1_epi64(0xD2511F53), multiplier1 = _mm512_set1_epi64(0xCD9E8D57);
    const __m512i lane = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    __m512i c0[4], c1[4], c2[4], c3[4];  // 64 bits per lane; what the high halves hold is ignored
    for (int i = 0; i < 4; i++) {
      c0[i] = _mm512_add_epi64(_mm512_set1_epi64(tile * LANES + 8 * i), lane);
      c1[i] = _mm512_srli_epi64(c0[i], 32);
      c2[i] = _mm512_set1_epi64(step_sample[0]);
      c3[i] = _mm512_set1_epi64(step_sample[1]);
    }
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
      const __m512i key0 = _mm512_set1_epi64(k0), key1 = _mm512_set1_epi64(k1);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const __m512i p0 = _mm512_mul_epu32(c0[i], multiplier0), p1 = _mm512_mul_epu32(c2[i], multiplier1);
        c0[i] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1[i], key0, 0x96);  // the xor of all three
        c1[i] = p1;
        c2[i] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3[i], key1, 0x96);
        c3[i] = p0;
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    for (int h = 0; h < 2; h++) {
      words[0][h] = low_halves(c0[2 * h], c0[2 * h + 1]);
      words[1][h] = low_halves(c1[2 * h], c1[2 * h + 1]);
      words[2][h] = low_halves(c2[2 * h], c2[2 * h + 1]);
      words[3][h] = low_halves(c3[2 * h], c3[2 * h + 1]);
    }
  }

  static __m512i low_halves(__m512i first, __m512i second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi64_epi32(first)), _mm512_cvtepi64_epi32(second), 1);
  }
};

// c z of 16 lanes in row `row` of a word: an entry of the table scaled by c, by 16 bits. Entry 65535 - i is entry i with
// its sign flipped, so the upper half of the table is enough, and more of it stays in the cache.
struct Gaussian {
  static constexpr int ROWS = 2;
  const float* upper;

  explicit Gaussian(const float* scaled) : upper(scaled + (1 << 15)) {}

  __m512 draw(__m512i word, int row) const {
    const __m512i code = row == 0 ? _mm512_slli_epi32(word, 16) : word;  // in the upper 16 bits
    const __m512i is_upper = _mm512_srai_epi32(code, 31);                // all bits set, or none
    const __m512i index = _mm512_andnot_si512(
        _mm512_xor_si512(_mm512_srli_epi32(code, 16), is_upper), _mm512_set1_epi32(0x7FFF));
    const __m512i entry = _mm512_castps_si512(_mm512_i32gather_ps(index, upper, sizeof(float)));
    const __m512i sign = _mm512_set1_epi32(static_cast<int32_t>(0x80000000u));
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(entry, code, sign, 0xD2));  // entry ^ (~code & sign)
  }
};

// +c for a set bit, else -c.
struct Rademacher {
  static constexpr int ROWS = 32;
  __m512 plus, minus;

  explicit Rademacher(const float* c) : plus(_mm512_set1_ps(*c)), minus(_mm512_set1_ps(-*c)) {}

  __m512 draw(__m512i word, int row) const {
    return _mm512_mask_blend_ps(_mm512_test_epi32_mask(word, _mm512_set1_epi32(1u << row)), minus, plus);
  }
};

// Numbers and keys of the tiles of a call, and the direction.
struct Tiles {
  const int32_t* numbers;
  const int64_t* keys;
  const int64_t* step_sample;
  int64_t count, threads;
};

// Call use(index of 16 elements, their c z) for all elements of all tiles.
template <class Draw, class Use>
__attribute__((always_inline)) inline void for_each(const Tiles& tiles, const float* scaled, const Use& use) {
  const Draw noise(scaled);
#pragma omp parallel for num_threads(tiles.threads) if (tiles.threads > 1 && tiles.count > SERIAL)
  for (int64_t t = 0; t < tiles.count; t++) {
    const Words tile(tiles.numbers[t], tiles.keys[t], tiles.step_sample);
    const int64_t start = t * 4 * Draw::ROWS * LANES;
    for (int k = 0; k < 4; k++)
#pragma GCC unroll 2
      for (int row = 0; row < Draw::ROWS; row++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++)
          use(start + (k * Draw::ROWS + row) * LANES + 16 * h, noise.draw(tile.words[k][h], row));
  }
}

// bfloat16 is the upper half of a float32; in this file its type is uint16_t.
inline __m512 load(const float* from) { return _mm512_loadu_ps(from); }

inline __m512 load(const uint16_t* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline void store(float* out, __m512 value) { _mm512_storeu_ps(out, value); }

// Store `value`, to whose bits `carry` is added first, as bfloat16; a nan stays one.
inline void store_upper(uint16_t* out, __m512 value, __m512i carry) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, carry), 16);
  const __mmask16 nan = _mm512_cmp_epi32_mask(
      _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF)), _mm512_set1_epi32(0x7F800000), _MM_CMPINT_NLE);
  const __m512i safe = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(safe));
}

// To the nearest, ties to even.
inline void store(uint16_t* out, __m512 value) {
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(value), 16), _mm512_set1_epi32(1));
  store_upper(out, value, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
}

// use(value, term) in float64, where `use` multiplies by a float32: its products are exact, contracted or not.
template <class Use>
__attribute__((always_inline)) inline __m512 in_float64(__m512 value, __m512 term, const Use& use) {
  const auto half = [&](__m256 v, __m256 t) { return _mm512_cvtpd_ps(use(_mm512_cvtps_pd(v), _mm512_cvtps_pd(t))); };
  const __m256 low = half(_mm512_castps512_ps256(value), _mm512_castps512_ps256(term));
  const __m256 high = half(_mm512_extractf32x8_ps(value, 1), _mm512_extractf32x8_ps(term, 1));
  return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

// factor * value + term
inline __m512 decayed(__m512 value, __m512 term, __m512d factor) {
  return in_float64(value, term, [=](__m512d v, __m512d t) { return _mm512_add_pd(_mm512_mul_pd(v, factor), t); });
}

// value - fraction * value + term
inline __m512 shrunk(__m512 value, __m512 term, __m512d fraction) {
  return in_float64(value, term, [=](__m512d v, __m512d t) {
    return _mm512_add_pd(_mm512_sub_pd(v, _mm512_mul_pd(v, fraction)), t);
  });
}

template <class Draw, class Theta, class Out>
void perturb(const Theta* theta, Out* out, Tiles tiles, const float* scaled) {
  for_each<Draw>(tiles, scaled, [=](int64_t i, __m512 cz) { store(out + i, _mm512_add_ps(load(theta + i), cz)); });
}

template <class Draw, class Theta, class Out>
void perturb_pair(const Theta* theta, Out* out, Out* out_minus, Tiles tiles, const float* scaled) {
  for_each<Draw>(tiles, scaled, [=](int64_t i, __m512 cz) {
    const __m512 value = load(theta + i);
    store(out + i, _mm512_add_ps(value, cz));
    store(out_minus + i, _mm512_sub_ps(value, cz));
  });
}

template <class Draw>
void add(float* theta, Tiles tiles, const float* scaled) {
  perturb<Draw>(theta, theta, tiles, scaled);
}

template <class Draw>
void decay(float* theta, Tiles tiles, const float* scaled, const double* decay_factor) {
  const __m512d factor = _mm512_set1_pd(*decay_factor);
  for_each<Draw>(tiles, scaled, [=](int64_t i, __m512 cz) { store(theta + i, decayed(load(theta + i), cz, factor)); });
}

template <class Draw>
void shrink(float* theta, Tiles tiles, const float* scaled, const double* fraction) {
  const __m512d d = _mm512_set1_pd(*fraction);
  for_each<Draw>(tiles, scaled, [=](int64_t i, __m512 cz) { store(theta + i, shrunk(load(theta + i), cz, d)); });
}

// Update theta in bfloat16 and round it stochastically, as rounding.py does: a block of words rounds 256 elements.
// `update` gives the new value of 16 elements from the old one and c z.
template <class Draw, class Update>
__attribute__((always_inline)) inline void rounded(
    uint16_t* theta, const Tiles& tiles, const float* scaled, const int64_t* rounding, const Update& update) {
  constexpr int ELEMENTS = 4 * 2 * LANES, BLOCKS = Draw::ROWS * 4 * LANES / ELEMENTS;
  const Draw noise(scaled);
#pragma omp parallel for num_threads(tiles.threads) if (tiles.threads > 1 && tiles.count > SERIAL)
  for (int64_t t = 0; t < tiles.count; t++) {
    const Words tile(tiles.numbers[t], tiles.keys[t], tiles.step_sample);
    for (int block = 0; block < BLOCKS; block++) {
      const Words bits(static_cast<int64_t>(tiles.numbers[t]) * BLOCKS + block, tiles.keys[t], rounding);
#pragma GCC unroll 8
      for (int r = 0; r < 8; r++) {
        const int row = block * 8 + r;  // of the tile; a word of it serves Draw::ROWS rows
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
          uint16_t* at = theta + (t * BLOCKS + block) * ELEMENTS + r * LANES + 16 * h;
          const __m512 cz = noise.draw(tile.words[row / Draw::ROWS][h], row % Draw::ROWS);
          const __m512i word = bits.words[r / 2][h];
          const __m512i carry =
              r % 2 == 0 ? _mm512_and_si512(word, _mm512_set1_epi32(0xFFFF)) : _mm512_srli_epi32(word, 16);
          store_upper(at, update(load(at), cz), carry);
        }
      }
    }
  }
}

template <class Draw>
void add_and_round(uint16_t* theta, Tiles tiles, const float* scaled, const int64_t* rounding) {
  rounded<Draw>(theta, tiles, scaled, rounding, [](__m512 value, __m512 cz) { return _mm512_add_ps(value, cz); });
}

template <class Draw>
void decay_and_round(
    uint16_t* theta, Tiles tiles, const float* scaled, const int64_t* rounding, const double* decay_factor) {
  const __m512d factor = _mm512_set1_pd(*decay_factor);
  rounded<Draw>(theta, tiles, scaled, rounding, [=](__m512 value, __m512 cz) { return decayed(value, cz, factor); });
}

template <class Draw>
void shrink_and_round(
    uint16_t* theta, Tiles tiles, const float* scaled, const int64_t* rounding, const double* fraction) {
  const __m512d d = _mm512_set1_pd(*fraction);
  rounded<Draw>(theta, tiles, scaled, rounding, [=](__m512 value, __m512 cz) { return shrunk(value, cz, d); });
}

}  // namespace
