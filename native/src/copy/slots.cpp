#include "aiokv/slots.hpp"

#include <algorithm>
#include <cstring>

#include "aiokv/error.hpp"

namespace aiokv {
namespace {

using Ids = std::span<const std::int32_t>;

void check_slots(std::int64_t num_slots, Ids sources, Ids targets) {
    if (sources.size() != targets.size() || targets.empty()) {
        throw UsageError(std::to_string(sources.size()) + " source slots for " +
                         std::to_string(targets.size()) + " targets");
    }
    std::vector<std::int32_t> written(targets.begin(), targets.end());
    std::sort(written.begin(), written.end());
    const auto refuse = [num_slots](std::int32_t id, const char* why) {
        throw UsageError("state slot " + std::to_string(id) + why + std::to_string(num_slots) +
                         " slots");
    };
    for (const std::int32_t id : targets) {
        if (id < 0 || id >= num_slots) refuse(id, " cannot be written: there are ");
    }
    for (const std::int32_t id : sources) {
        if (id < -1 || id >= num_slots) refuse(id, " cannot be read: there are ");
        if (std::binary_search(written.begin(), written.end(), id)) {
            refuse(id, " is both read and written, of ");
        }
    }
    const auto twice = std::adjacent_find(written.begin(), written.end());
    if (twice != written.end()) refuse(*twice, " is written twice, of ");
}

char* slot(const SlotPiece& piece, std::int32_t id) {
    return reinterpret_cast<char*>(piece.base) + static_cast<std::size_t>(id) * piece.stride;
}

}  // namespace

std::shared_ptr<CopyJob> move_slots(Stream& stream, std::vector<SlotPiece> pieces,
                                    std::int64_t num_slots, Ids sources, Ids targets,
                                    std::shared_ptr<Event> after) {
    check_slots(num_slots, sources, targets);
    auto done = std::make_shared<Event>();
    const auto generation = done->open();
    auto job = std::make_shared<CopyJob>(std::vector{done});
    const auto after_generation = after ? after->generation() : 0;
    if (after) stream.wait_event(after);
    stream.push([=, from = std::vector(sources.begin(), sources.end()),
                 to = std::vector(targets.begin(), targets.end()),
                 pieces = std::move(pieces)](const std::atomic<bool>& stop) {
        std::string failure = after ? failure_of(*after, after_generation) : "";
        if (stop.load(std::memory_order_relaxed)) failure = "the stream was aborted";
        for (std::size_t i = 0; failure.empty() && i < to.size(); ++i) {
            for (const SlotPiece& piece : pieces) {
                char* target = slot(piece, to[i]);
                if (from[i] < 0) {
                    std::memset(target, 0, piece.bytes);
                } else {
                    std::memcpy(target, slot(piece, from[i]), piece.bytes);
                }
            }
        }
        if (!failure.empty()) job->fail({0, failure});
        done->finish(generation, failure);
    });
    return job;
}

}  // namespace aiokv
