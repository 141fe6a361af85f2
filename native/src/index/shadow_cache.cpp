#include "aiokv/shadow_cache.hpp"

namespace aiokv {

ShadowCache::ShadowCache(std::uint32_t room, const ReuseModel* model)
    : room_(room),
      has_classes_(model != nullptr),
      slots_(std::bit_ceil(std::max(room, 1u)), kNil),
      queue_(stretches_, model) {
    stretches_.reserve(room);
}

ShadowCache::Id ShadowCache::find(std::uint32_t tag) {
    Id id = slot_of(tag);
    while (id != kNil && stretches_[id].tag != tag) id = stretches_[id].next_in_slot;
    return id;
}

ShadowCache::Id ShadowCache::insert(std::uint32_t tag) {
    auto id = static_cast<Id>(stretches_.size());
    if (free_.empty()) {
        stretches_.emplace_back();
    } else {
        id = free_.back();
        free_.pop_back();
    }
    stretches_[id].tag = tag;
    stretches_[id].next_in_slot = slot_of(tag);
    slot_of(tag) = id;
    ++held_;
    return id;
}

void ShadowCache::evict_one() {
    const Id id = queue_.front();
    queue_.remove(id);
    Id* link = &slot_of(stretches_[id].tag);
    while (*link != id) link = &stretches_[*link].next_in_slot;
    *link = stretches_[id].next_in_slot;
    free_.push_back(id);
    --held_;
}

std::uint32_t ShadowCache::use(std::span<const std::uint64_t> keys,
                               std::span<const ReuseClass> classes) {
    prompt_.clear();
    for (const std::uint64_t key : keys) {
        __builtin_prefetch(&slot_of(static_cast<std::uint32_t>(key)));
    }
    std::uint32_t hits = 0;
    std::uint32_t missing = 0;
    for (const std::uint64_t key : keys) {
        Id id = find(static_cast<std::uint32_t>(key));
        if (id != kNil && stretches_[id].prev == kNil) id = kNil;  // equal tags in one prompt
        if (id != kNil) queue_.remove(id);
        hits += id != kNil && missing == 0;
        missing += id == kNil;
        prompt_.push_back(id);
    }
    while (held_ + missing > room_ && queue_.size() > 0) evict_one();
    for (std::size_t i = keys.size(); i-- > 0;) {  // deepest first, like the release of a lease
        if (prompt_[i] == kNil) prompt_[i] = insert(static_cast<std::uint32_t>(keys[i]));
        stretches_[prompt_[i]].reuse_class = has_classes_ ? classes[i] : ReuseClass{0};
        queue_.push_back(prompt_[i]);
    }
    return hits;
}

void ShadowCache::reclassify(std::span<const std::uint64_t> keys,
                             std::span<const ReuseClass> classes) {
    for (std::size_t i = keys.size(); i-- > 0;) {
        const Id id = find(static_cast<std::uint32_t>(keys[i]));
        if (id == kNil) continue;
        queue_.remove(id);
        stretches_[id].reuse_class = classes[i];
        queue_.push_back(id);
    }
}

}  // namespace aiokv
