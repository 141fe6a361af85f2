#include "aiokv/sha256.hpp"

#include <algorithm>
#include <bit>

#include "sha256_constants.hpp"

namespace aiokv {
namespace {

std::uint32_t load_big_endian(const std::uint8_t* bytes) {
    return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 |
           std::uint32_t{bytes[2]} << 8 | bytes[3];
}

void store_big_endian(std::uint8_t* bytes, std::uint32_t word) {
    for (int i = 0; i < 4; ++i) bytes[i] = static_cast<std::uint8_t>(word >> (24 - 8 * i));
}

void add_block(std::uint32_t* state, const std::uint8_t* bytes) {
    std::array<std::uint32_t, 64> w;
    for (std::size_t i = 0; i < 16; ++i) w[i] = load_big_endian(bytes + 4 * i);
    for (std::size_t i = 16; i < 64; ++i) {
        const std::uint32_t x = w[i - 15], y = w[i - 2];
        const std::uint32_t sigma0 = std::rotr(x, 7) ^ std::rotr(x, 18) ^ x >> 3;
        const std::uint32_t sigma1 = std::rotr(y, 17) ^ std::rotr(y, 19) ^ y >> 10;
        w[i] = w[i - 16] + sigma0 + w[i - 7] + sigma1;
    }
    auto [a, b, c, d, e, f, g, h] = std::to_array(
        {state[0], state[1], state[2], state[3], state[4], state[5], state[6], state[7]});
    for (std::size_t i = 0; i < 64; ++i) {
        const std::uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
        const std::uint32_t choice = (e & f) ^ (~e & g);
        const std::uint32_t t1 = h + sum1 + choice + kSha256RoundConstants[i] + w[i];
        const std::uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
        const std::uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
        h = g, g = f, f = e, e = d + t1;
        d = c, c = b, b = a, a = t1 + sum0 + majority;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

}  // namespace

void sha256_blocks_portable(std::uint32_t* state, const std::uint8_t* bytes, std::size_t blocks) {
    for (; blocks > 0; --blocks, bytes += 64) add_block(state, bytes);
}

Sha256Blocks sha256_blocks_fastest() {
    static const Sha256Blocks fastest =
        sha256_blocks_native() != nullptr ? sha256_blocks_native() : sha256_blocks_portable;
    return fastest;
}

Digest sha256_digest(const std::array<std::uint32_t, 8>& state) {
    Digest digest;
    for (std::size_t i = 0; i < state.size(); ++i) store_big_endian(&digest[4 * i], state[i]);
    return digest;
}

Sha256::Sha256(Sha256Blocks add_blocks) : add_blocks_(add_blocks), state_(kSha256InitialState) {}

void Sha256::add(std::span<const std::uint8_t> bytes) {
    const std::size_t begun = num_bytes_ % kBlockBytes;
    num_bytes_ += bytes.size();
    if (begun > 0) {
        const std::size_t taken = std::min(bytes.size(), kBlockBytes - begun);
        std::copy_n(bytes.begin(), taken, buffer_.begin() + begun);
        if (begun + taken < kBlockBytes) return;
        add_blocks_(state_.data(), buffer_.data(), 1);
        bytes = bytes.subspan(taken);
    }
    const std::size_t blocks = bytes.size() / kBlockBytes;
    add_blocks_(state_.data(), bytes.data(), blocks);
    const auto rest = bytes.subspan(blocks * kBlockBytes);
    std::copy(rest.begin(), rest.end(), buffer_.begin());
}

Digest Sha256::finish() {
    // The padding: a bit 1, zeros up to the last 8 bytes of a block, and the number of bits.
    std::array<std::uint8_t, 2 * kBlockBytes> last{};
    const std::size_t begun = num_bytes_ % kBlockBytes;
    std::copy_n(buffer_.begin(), begun, last.begin());
    last[begun] = 0x80;
    const std::size_t blocks = begun + 9 <= kBlockBytes ? 1 : 2;
    std::uint8_t* length = last.data() + blocks * kBlockBytes - 8;
    store_big_endian(length, static_cast<std::uint32_t>(num_bytes_ >> 29));
    store_big_endian(length + 4, static_cast<std::uint32_t>(num_bytes_ << 3));
    add_blocks_(state_.data(), last.data(), blocks);
    return sha256_digest(state_);
}

}  // namespace aiokv
