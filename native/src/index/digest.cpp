#include "aiokv/digest.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

namespace aiokv {
namespace {

constexpr std::array<std::uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

class Sha256 {
  public:
    void add(const void* data, std::size_t size) {
        const auto* bytes = static_cast<const std::uint8_t*>(data);
        total_ += size;
        while (size > 0) {
            const std::size_t part = std::min(size, buffer_.size() - used_);
            std::memcpy(&buffer_[used_], bytes, part);
            used_ += part;
            bytes += part;
            size -= part;
            if (used_ == buffer_.size()) compress();
        }
    }
    void add_number(std::uint32_t number) {
        std::array<std::uint8_t, 4> bytes;
        for (std::size_t i = 0; i < 4; ++i) bytes[i] = static_cast<std::uint8_t>(number >> (8 * i));
        add(bytes.data(), bytes.size());
    }
    Digest finish() {
        const std::uint64_t bits = total_ * 8;
        constexpr std::uint8_t kOne = 0x80;
        constexpr std::uint8_t kZero = 0;
        add(&kOne, 1);
        while (used_ != 56) add(&kZero, 1);
        for (int shift = 56; shift >= 0; shift -= 8) {
            const auto byte = static_cast<std::uint8_t>(bits >> shift);
            add(&byte, 1);
        }
        Digest digest;
        for (std::size_t i = 0; i < digest.size(); ++i) {
            digest[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
        }
        return digest;
    }

  private:
    void compress() {
        used_ = 0;
        std::array<std::uint32_t, 64> w;
        for (std::size_t i = 0; i < 16; ++i) {
            w[i] = std::uint32_t{buffer_[4 * i]} << 24 | std::uint32_t{buffer_[4 * i + 1]} << 16 |
                   std::uint32_t{buffer_[4 * i + 2]} << 8 | buffer_[4 * i + 3];
        }
        for (std::size_t i = 16; i < 64; ++i) {
            const std::uint32_t a = w[i - 15];
            const std::uint32_t b = w[i - 2];
            w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) + w[i - 7] +
                   (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
        }
        auto [a, b, c, d, e, f, g, h] = state_;
        for (std::size_t i = 0; i < 64; ++i) {
            const std::uint32_t first = h +
                                        (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                                        ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
            const std::uint32_t second = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) +
                                         ((a & b) ^ (a & c) ^ (b & c));
            h = g;
            g = f;
            f = e;
            e = d + first;
            d = c;
            c = b;
            b = a;
            a = first + second;
        }
        const std::array<std::uint32_t, 8> more = {a, b, c, d, e, f, g, h};
        for (std::size_t i = 0; i < more.size(); ++i) state_[i] += more[i];
    }

    std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                           0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<std::uint8_t, 64> buffer_;
    std::size_t used_ = 0;
    std::uint64_t total_ = 0;
};

}  // namespace

Digest root_digest(std::uint32_t block_tokens, std::string_view context) {
    constexpr std::string_view kName("aiokv root 1\0", 13);
    Sha256 hash;
    hash.add(kName.data(), kName.size());
    hash.add_number(block_tokens);
    hash.add_number(static_cast<std::uint32_t>(context.size()));
    hash.add(context.data(), context.size());
    return hash.finish();
}

Digest block_digest(const Digest& parent, std::span<const std::int32_t> tokens,
                    std::string_view items) {
    Sha256 hash;
    hash.add(parent.data(), parent.size());
    for (const std::int32_t token : tokens) hash.add_number(static_cast<std::uint32_t>(token));
    if (!items.empty()) {
        hash.add_number(static_cast<std::uint32_t>(items.size()));
        hash.add(items.data(), items.size());
    }
    return hash.finish();
}

}  // namespace aiokv
