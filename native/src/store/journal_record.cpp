#include "aiokv/journal_record.hpp"

#include <cstring>

namespace aiokv {
namespace {

// Returns both halves of a 128-bit product, combined: each bit of the operands changes about half
// of the result.
std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15;
constexpr std::uint64_t kOther = 0xd1b54a32d192ed03;

}  // namespace

std::uint64_t record_checksum(const JournalRecord& record, std::uint64_t epoch,
                              std::uint64_t position) {
    std::array<std::uint64_t, sizeof(JournalRecord) / 8> words;
    std::memcpy(words.data(), &record, sizeof(record));
    std::uint64_t sum = mix(epoch ^ kOther, position + kOdd);
    for (std::size_t i = 1; i < words.size(); ++i) {
        sum = mix(sum ^ words[i], kOdd + 2 * i) ^ std::rotl(words[i] + sum, 29);
    }
    sum = mix(sum ^ kOther, kOdd);
    return sum == 0 ? 1 : sum;  // never 0, so that zero bytes are no record
}

void stamp_records(std::span<JournalRecord> records, std::uint64_t epoch, std::uint64_t position) {
    for (JournalRecord& record : records) {
        record.checksum = record_checksum(record, epoch, position++);
    }
}

}  // namespace aiokv
