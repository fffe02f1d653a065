// Runs the kernels of simd.cpp on made-up inputs, and compares the CRC of each result with a stored one:
//     PROGRAM tests/perturb/simd_vectors.txt
// Built and run by test_compiled.py, also for another machine. A line of the file is
//     kind operation theta_type out_type arrays blocks crc
// Prints each line whose CRC differs, with its own; exit status 1 if there is one.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

extern "C" void mezo_noise(int, int, int, int, int, int64_t, int64_t, int64_t, void* const*);

constexpr int COUNT = 3, BLOCK = 256;

// Element i of theta: finite, of many sizes, in float32 (type 0), bfloat16 (1) or float16 (2).
static uint32_t element(int type, uint32_t i) {
  const uint32_t h = i * 2654435761u + 12345u, exponent = 100 + 3 * (h >> 23 & 15);
  if (type == 0) return (h & 0x807FFFFFu) | exponent << 23;
  if (type == 1) return (h >> 16 & 0x807Fu) | exponent << 7;
  return (h >> 16 & 0x83FFu) | h % 31 << 10;
}

static uint32_t crc32(uint32_t crc, const std::vector<uint8_t>& bytes) {
  crc = ~crc;
  for (uint8_t byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
  }
  return ~crc;
}

int main(int, char** argv) {
  int32_t numbers[COUNT] = {5, 6, 1 << 26};
  int64_t keys[COUNT] = {0x123456789ABCDEF0, 0x123456789ABCDEF0, -7};
  int64_t step_sample[2] = {3, 1}, rounding[2] = {3, 0xFFFFFFFF};
  double number = 1 - 1.0 / 1024;
  std::vector<float> scaled(65536);
  FILE* file = fopen(argv[1], "r");
  int kind, operation, types[2], arrays, blocks, wrong = 0, lines = 0;
  uint32_t crc;
  while (fscanf(file, "%d %d %d %d %d %d %x", &kind, &operation, types, types + 1, &arrays, &blocks, &crc) == 7) {
    for (int i = 0; i < 65536; i++) scaled[i] = kind == 0 ? (2 * i - 65535) / 1048576.0f : 0.0234375f;
    const uint32_t numel = COUNT * blocks * BLOCK;
    std::vector<std::vector<uint8_t>> data;
    for (int a = 0; a < arrays; a++) data.emplace_back(numel * (types[a > 0] == 0 ? 4 : 2));
    for (uint32_t i = 0; i < numel; i++) {  // little-endian
      const uint32_t value = element(types[0], i), size = types[0] == 0 ? 4 : 2;
      memcpy(&data[0][i * size], &value, size);
    }
    std::vector<void*> tensors;
    for (auto& array : data) tensors.push_back(array.data());
    for (void* input : {(void*)numbers, (void*)keys, (void*)step_sample}) tensors.push_back(input);
    if (operation < 4) tensors.push_back(scaled.data());
    if (operation >= 4) tensors.back() = rounding;
    if (operation < 4 && operation > 0 && types[0] != 0) tensors.push_back(rounding);
    tensors.push_back(&number);
    mezo_noise(kind, operation, types[0], types[1], arrays, blocks, COUNT, 1, tensors.data());
    uint32_t actual = 0;
    for (int a = arrays > 1; a < arrays; a++) actual = crc32(actual, data[a]);
    lines++;
    if (actual == crc) continue;
    wrong++;
    printf("%d %d %d %d %d %d %08x, not %08x\n", kind, operation, types[0], types[1], arrays, blocks, actual, crc);
  }
  printf("%d of %d differ\n", wrong, lines);
  return wrong > 0 || lines == 0;
}
