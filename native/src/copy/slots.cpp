#include "aiokv/slots.hpp"

#include <cstring>

#include "aiokv/ids.hpp"

namespace aiokv {
namespace {

using Ids = std::span<const std::int32_t>;

char* slot(const SlotPiece& piece, std::int32_t id) {
    return reinterpret_cast<char*>(piece.base) + static_cast<std::size_t>(id) * piece.stride;
}

}  // namespace

std::shared_ptr<CopyJob> move_slots(Stream& stream, std::vector<SlotPiece> pieces,
                                    std::int64_t num_slots, Ids sources, Ids targets,
                                    std::shared_ptr<Event> after) {
    const IdPool pool{"state slot", num_slots};
    check_ids({.sources = sources, .targets = targets, .zeros = true, .same_pool = true}, pool,
              pool);
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
