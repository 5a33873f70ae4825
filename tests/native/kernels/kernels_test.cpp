// The optimizer kernels without Python: exactly sized buffers under the sanitizers, a thousand steps against
// fp64, every instruction set against the scalar one. With the argument "exhaustive", the compact remainder
// for all 2^32 patterns (seconds with optimization, minutes under a sanitizer), otherwise for every 251st.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "../../../csrc/cpu_adam/cpu_adam.h"
#include "../check.h"

using namespace offloadzero::cpu_adam;

namespace {

constexpr size_t SIZES[] = {1, 15, 16, 17, 127, 128, 129, 4097, 40003};
constexpr int THREADS = 2;
const StepScalars ADAMW = {0.5f, 0.9f,     0.1f,  0.999f,     0.001f,     1e-8f, 1e-3f,
                           1.5f, 0.99999f, 0.01f, 0.9994999f, 0.0316228f, true};

std::vector<Isa> isas() {
    std::vector<Isa> found;
    for (Isa isa : {Isa::SCALAR, Isa::AVX2, Isa::AVX512}) {
        if (isa_supported(isa)) found.push_back(isa);
    }
    return found;
}

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Ordinary values, then zeros of both signs, subnormals, tiny and huge ones.
std::vector<float> values(size_t n, float scale, unsigned seed, bool with_specials) {
    constexpr float SPECIALS[] = {0.0f, -0.0f, 1e-40f, -1e-45f, 1e-25f, -1e18f, 3e38f, -1e30f};
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> result(n);
    for (size_t i = 0; i < n; ++i) result[i] = normal(generator);
    for (size_t k = 0; with_specials && k < 8 && n > 100; ++k) result[k * 37 % n] = SPECIALS[k];
    return result;
}

std::vector<float> squares(std::vector<float> x) {
    for (float& value : x) value *= value;
    return x;
}

// A gradient in its dtype; fp16 patterns come from the upper bits as they are: any pattern will do.
std::vector<uint8_t> grad_bytes(const std::vector<float>& grad, DType dtype) {
    const size_t size = dtype == DType::FP32 ? 4 : 2;
    std::vector<uint8_t> bytes(grad.size() * size);
    for (size_t i = 0; i < grad.size(); ++i) {
        const uint32_t bits = bits_of(grad[i]);
        const uint16_t half =
            static_cast<uint16_t>(dtype == DType::FP16 ? (bits >> 18 & 0x3FFFu) : bits >> 16);
        if (size == 4) {
            std::memcpy(&bytes[i * 4], &bits, 4);
        } else {
            std::memcpy(&bytes[i * 2], &half, 2);
        }
    }
    return bytes;
}

struct Compact {
    std::vector<uint16_t> param;
    std::vector<int8_t> remainder, exp_avg;
    std::vector<uint8_t> exp_avg_sq;
    std::vector<float> scales;

    explicit Compact(size_t n)
        : param(n),
          remainder(n),
          exp_avg(n),
          exp_avg_sq(n),
          scales((n + COMPACT_BLOCK - 1) / COMPACT_BLOCK * 2) {}
    CompactBuffers buffers(const void* grad) {
        return {param.data(), remainder.data(), exp_avg.data(), exp_avg_sq.data(), scales.data(), grad};
    }
    bool operator==(const Compact& other) const {
        return param == other.param && remainder == other.remainder && exp_avg == other.exp_avg &&
               exp_avg_sq == other.exp_avg_sq &&
               std::memcmp(scales.data(), other.scales.data(), scales.size() * sizeof(float)) == 0;
    }
};

void compact_is_the_same_for_every_isa(size_t n, DType dtype) {
    std::vector<float> master = values(n, 0.05f, 1, true), m = values(n, 1e-3f, 2, false);
    std::vector<float> v = squares(values(n, 1e-3f, 3, false));
    const std::vector<uint8_t> grad = grad_bytes(values(n, 1e-2f, 4, true), dtype);
    Compact expected(n);
    for (Isa isa : isas()) {
        Compact record(n);
        CHECK_EQUAL(
            compact_encode({master.data(), m.data(), v.data()}, record.buffers(nullptr), n, isa, THREADS), 0);
        for (uint32_t step = 1; step <= 5; ++step) {
            CHECK_EQUAL(compact_adam_step(record.buffers(grad.data()), dtype, ADAMW, step, n, isa, THREADS),
                        0);
        }
        std::vector<float> out[3] = {std::vector<float>(n), std::vector<float>(n), std::vector<float>(n)};
        CHECK_EQUAL(compact_decode(record.buffers(nullptr), {out[0].data(), out[1].data(), out[2].data()}, n,
                                   isa, THREADS),
                    0);
        if (isa == Isa::SCALAR) expected = record;
        CHECK(record == expected);
    }
}

// One bad element: its weight is NaN, its block's scale is, every other block is as without it.
void compact_reports_what_is_not_finite(Isa isa, float bad) {
    const size_t n = 5 * COMPACT_BLOCK, at = 2 * COMPACT_BLOCK + 37;
    std::vector<float> zeros(n), master = values(n, 0.05f, 1, false), grad = values(n, 1e-2f, 4, false);
    Compact clean(n), record(n);
    for (Compact* target : {&clean, &record}) {
        CHECK_EQUAL(
            compact_encode({master.data(), zeros.data(), zeros.data()}, target->buffers(nullptr), n, isa, 1),
            0);
    }
    CHECK_EQUAL(compact_adam_step(clean.buffers(grad.data()), DType::FP32, ADAMW, 3, n, isa, 1), 0);
    grad[at] = bad;
    CHECK_EQUAL(compact_adam_step(record.buffers(grad.data()), DType::FP32, ADAMW, 3, n, isa, 1), 0);
    CHECK((record.param[at] & 0x7FFFu) > 0x7F80u);
    CHECK(std::isnan(record.scales[4]));
    for (size_t i = 0; i < n; ++i) {
        if (i / COMPACT_BLOCK == 2) continue;
        CHECK(record.param[i] == clean.param[i] && record.remainder[i] == clean.remainder[i] &&
              record.exp_avg[i] == clean.exp_avg[i] && record.exp_avg_sq[i] == clean.exp_avg_sq[i]);
    }
}

// |patterns(decoded) - patterns(weight)| <= 128 for finite weights: [Note: compact state].
void compact_remainder(uint32_t stride) {
    const Isa isa = isas().back();
    constexpr size_t CHUNK = 4096;
    std::vector<float> master(CHUNK), zeros(CHUNK), m(CHUNK), v(CHUNK), decoded(CHUNK);
    Compact record(CHUNK);
    for (uint64_t first = 0; first < (uint64_t{1} << 32); first += uint64_t{CHUNK} * stride) {
        for (size_t i = 0; i < CHUNK; ++i) {
            master[i] = from_bits(static_cast<uint32_t>(first + i * stride));
        }
        CHECK_EQUAL(compact_encode({master.data(), zeros.data(), zeros.data()}, record.buffers(nullptr),
                                   CHUNK, isa, 1),
                    0);
        CHECK_EQUAL(
            compact_decode(record.buffers(nullptr), {decoded.data(), m.data(), v.data()}, CHUNK, isa, 1), 0);
        for (size_t i = 0; i < CHUNK; ++i) {
            if (!std::isfinite(master[i])) {
                CHECK(!std::isfinite(decoded[i]) && std::isnan(master[i]) == std::isnan(decoded[i]));
                continue;
            }
            const int64_t apart = int64_t{bits_of(decoded[i])} - int64_t{bits_of(master[i])};
            CHECK(apart >= -127 && apart <= 128);
            CHECK((bits_of(decoded[i]) & 0xFFu) == 0);
        }
    }
}

struct Fp32Record {
    std::vector<uint16_t> param;
    std::vector<int16_t> remainder;
    std::vector<float> m, v;
};

Fp32Record split_record(size_t n, Isa isa) {
    Fp32Record record{std::vector<uint16_t>(n), std::vector<int16_t>(n), values(n, 1e-3f, 2, false),
                      squares(values(n, 1e-3f, 3, false))};
    const std::vector<float> master = values(n, 0.05f, 1, true);
    CHECK_EQUAL(split_master(master.data(), record.param.data(), record.remainder.data(), n, isa, THREADS),
                0);
    return record;
}

// Adam, Lion, Adagrad and SGD on bf16 with its remainder and on fp32, and the sum of squares, for every
// gradient dtype.
void fp32_layouts_are_the_same_for_every_isa(size_t n, DType dtype) {
    const std::vector<uint8_t> grad = grad_bytes(values(n, 1e-2f, 4, true), dtype);
    StepScalars l2 = ADAMW;
    l2.decoupled = false;
    Fp32Record expected;
    std::vector<float> expected_plain;
    double expected_norm = 0.0;
    for (Isa isa : isas()) {
        Fp32Record r = split_record(n, isa);
        std::vector<float> plain = values(n, 0.05f, 5, true);
        double norm = 0.0;
        CHECK_EQUAL(sq_norm(grad.data(), dtype, n, isa, THREADS, &norm), 0);
        for (const StepScalars& s : {ADAMW, l2}) {
            const AdamBuffers adam{r.param.data(), r.remainder.data(), r.m.data(), r.v.data(), grad.data()};
            CHECK_EQUAL(adam_step(adam, Layout::BF16_SPLIT, dtype, s, n, isa, THREADS), 0);
            const MomentBuffers lion{r.param.data(), r.remainder.data(), r.m.data(), grad.data()};
            CHECK_EQUAL(lion_step(lion, Layout::BF16_SPLIT, dtype, s, n, isa, THREADS), 0);
            const MomentBuffers adagrad{plain.data(), nullptr, r.v.data(), grad.data()};
            CHECK_EQUAL(adagrad_step(adagrad, Layout::FP32, dtype, s, n, isa, THREADS), 0);
            CHECK_EQUAL(sgd_step(adagrad, Layout::FP32, dtype, s, n, isa, THREADS), 0);
        }
        if (isa == Isa::SCALAR) expected = r, expected_plain = plain, expected_norm = norm;
        CHECK(norm == expected_norm || (std::isnan(norm) && std::isnan(expected_norm)));
        CHECK(r.param == expected.param && r.remainder == expected.remainder);
        for (size_t i = 0; i < n; ++i) {
            CHECK_EQUAL(bits_of(r.m[i]), bits_of(expected.m[i]));
            CHECK_EQUAL(bits_of(r.v[i]), bits_of(expected.v[i]));
            CHECK_EQUAL(bits_of(plain[i]), bits_of(expected_plain[i]));
        }
    }
}

// Every step of a thousand within 1e-6 * max(|weight|, lr) of the fp64 step from the same state, elementwise.
void a_thousand_steps_against_fp64(Isa isa) {
    const size_t n = 1009;
    const double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
    std::vector<float> p = values(n, 0.05f, 1, false), m(n), v(n);
    std::vector<double> before(n), m64(n), v64(n);
    for (int step = 1; step <= 1000; ++step) {
        const std::vector<float> grad = values(n, 1e-2f, 1000 + static_cast<unsigned>(step), false);
        const double correction1 = 1.0 - std::pow(beta1, step), correction2 = 1.0 - std::pow(beta2, step);
        const StepScalars scalars = {1.0f,
                                     static_cast<float>(beta1),
                                     static_cast<float>(1.0 - beta1),
                                     static_cast<float>(beta2),
                                     static_cast<float>(1.0 - beta2),
                                     static_cast<float>(eps),
                                     static_cast<float>(lr / correction1),
                                     static_cast<float>(1.0 / std::sqrt(correction2)),
                                     static_cast<float>(1.0 - lr * weight_decay),
                                     static_cast<float>(weight_decay),
                                     0.0f,
                                     0.0f,
                                     true};
        for (size_t i = 0; i < n; ++i) {
            const double g = grad[i];
            m64[i] = beta1 * m[i] + (1.0 - beta1) * g;
            v64[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
            const double denom = std::sqrt(v64[i] / correction2) + eps;
            before[i] = p[i] - lr * weight_decay * p[i] - lr * (m64[i] / correction1) / denom;
        }
        const AdamBuffers buffers{p.data(), nullptr, m.data(), v.data(), grad.data()};
        CHECK_EQUAL(adam_step(buffers, Layout::FP32, DType::FP32, scalars, n, isa, THREADS), 0);
        for (size_t i = 0; i < n; ++i) {
            CHECK(std::fabs(p[i] - before[i]) <= 1e-6 * std::fmax(std::fabs(before[i]), lr));
            CHECK(std::fabs(v[i] - v64[i]) <= 1e-6 * v64[i]);
        }
    }
}

void stream_reads_and_inverts() {
    constexpr size_t N = 64 * STREAM_CHUNK;
    std::vector<uint16_t> written(N, 0x1234);
    std::vector<uint8_t> read(N, 1);
    StreamArrays arrays{{written.data(), read.data()}, {2, 1}, 2, 1, true};
    for (Isa isa : isas()) {
        uint64_t sink = 0;
        CHECK_EQUAL(stream(arrays, N, isa, THREADS, &sink), 0);
        CHECK(sink != 0);
        for (size_t i = 0; i < N; ++i) CHECK_EQUAL(written[i], 0xEDCB);
        CHECK_EQUAL(stream(arrays, N, isa, THREADS, &sink), 0);
        for (size_t i = 0; i < N; ++i) CHECK_EQUAL(written[i], 0x1234);
        CHECK(stream(arrays, N + 1, isa, THREADS, &sink) != 0);
    }
    for (size_t i = 0; i < N; ++i) CHECK_EQUAL(read[i], 1);
}

}  // namespace

int main(int argc, char** argv) {
    for (size_t n : SIZES) {
        for (DType dtype : {DType::BF16, DType::FP16, DType::FP32}) {
            compact_is_the_same_for_every_isa(n, dtype);
            fp32_layouts_are_the_same_for_every_isa(n, dtype);
        }
    }
    for (Isa isa : isas()) {
        a_thousand_steps_against_fp64(isa);
        for (float bad : {NAN, INFINITY, -INFINITY}) compact_reports_what_is_not_finite(isa, bad);
    }
    stream_reads_and_inverts();
    compact_remainder(argc > 1 && std::strcmp(argv[1], "exhaustive") == 0 ? 1 : 251);
    std::puts("ok");
    return 0;
}
