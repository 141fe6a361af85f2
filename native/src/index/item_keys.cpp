#include "aiokv/item_keys.hpp"

#include "aiokv/error.hpp"

namespace aiokv {
namespace {

void append_number(std::string& bytes, std::int64_t number) {
    for (int shift = 0; shift < 64; shift += 8) {
        bytes.push_back(static_cast<char>(static_cast<std::uint64_t>(number) >> shift));
    }
}

std::int64_t number_at(std::string_view bytes, std::size_t place) {
    std::uint64_t number = 0;
    for (std::size_t i = 8; i-- > 0;) {
        number = number << 8 | static_cast<unsigned char>(bytes[place + i]);
    }
    return static_cast<std::int64_t>(number);
}

}  // namespace

ItemKey ItemKeys::intern(std::string bytes) {
    const auto [entry, is_new] = ids_.try_emplace(std::move(bytes), kNoItems);
    if (!is_new) {
        ref(entry->second);
        return entry->second;
    }
    if (free_.empty()) {
        entries_.emplace_back();
        free_.push_back(static_cast<ItemKey>(entries_.size()));
    }
    entry->second = free_.back();
    free_.pop_back();
    entries_[entry->second - 1] = {&entry->first, 1};
    return entry->second;
}

ItemKey ItemKeys::find(const std::string& bytes) const {
    const auto entry = ids_.find(bytes);
    return entry == ids_.end() ? kUnknownItems : entry->second;
}

void ItemKeys::unref(ItemKey key) {
    Entry& entry = entries_[key - 1];
    if (--entry.refs > 0) return;
    ids_.erase(ids_.find(*entry.bytes));
    entry.bytes = nullptr;
    free_.push_back(key);
}

void ItemKeys::attach(NodeId node, ItemKey key) {
    ref(key);
    of_node_.emplace(node, key);
}

void ItemKeys::detach(NodeId node) {
    const auto entry = of_node_.find(node);
    unref(entry->second);
    of_node_.erase(entry);
}

void ItemKeys::detach_all() {
    for (const auto& [node, key] : of_node_) unref(key);
    of_node_.clear();
}

std::uint64_t ItemKeys::total_refs() const {
    std::uint64_t total = 0;
    for (const Entry& entry : entries_) total += entry.refs;
    return total;
}

void check_items(std::span<const Item> items, std::size_t first, std::size_t end) {
    const auto limit = static_cast<std::int64_t>(end);
    auto free_from = static_cast<std::int64_t>(first);
    for (const Item& item : items) {
        const std::string where = "an item at position " + std::to_string(item.offset) + " of " +
                                  std::to_string(item.length) + " positions ";
        if (item.hash.empty()) throw UsageError(where + "has no hash");
        if (item.length < 1) throw UsageError(where + "is empty");
        if (item.offset < free_from) {
            throw UsageError(where + "begins before position " + std::to_string(free_from) +
                             (first > 0 && item.offset < static_cast<std::int64_t>(first)
                                  ? ", the first of the appended tokens; offsets count from the "
                                    "first position of the prompt"
                                  : ": items are in order and do not overlap"));
        }
        if (item.offset > limit || item.length > limit - item.offset) {
            throw UsageError(where +
                             (first > 0 ? "ends behind the appended tokens, which end at position "
                                        : "ends behind the prompt of ") +
                             std::to_string(end) + (first > 0 ? "" : " positions"));
        }
        free_from = item.offset + item.length;
    }
}

std::vector<std::string> item_key_bytes(std::span<const Item> items, std::uint32_t block_tokens) {
    std::vector<std::string> keys;
    for (const Item& item : items) {
        const auto first = static_cast<std::size_t>(item.offset / block_tokens);
        const auto last = static_cast<std::size_t>((item.offset + item.length - 1) / block_tokens);
        keys.resize(last + 1);
        for (std::size_t block = first; block <= last; ++block) {
            std::string& bytes = keys[block];
            append_number(bytes, static_cast<std::int64_t>(item.hash.size()));
            bytes += item.hash;
            append_number(bytes, item.offset - static_cast<std::int64_t>(block * block_tokens));
            append_number(bytes, item.length);
        }
    }
    return keys;
}

void add_beginning_items(std::string_view bytes, std::uint64_t first, std::uint64_t end,
                         std::string& prompt) {
    for (std::size_t at = 0; at < bytes.size();) {
        const std::size_t offset = at + 8 + static_cast<std::size_t>(number_at(bytes, at));
        const std::int64_t position = number_at(bytes, offset);
        if (position >= static_cast<std::int64_t>(end)) break;
        if (position >= 0) {
            prompt += bytes.substr(at, offset - at);
            append_number(prompt, position + static_cast<std::int64_t>(first));
            prompt += bytes.substr(offset + 8, 8);
        }
        at = offset + 16;
    }
}

std::string item_key_before(std::string_view bytes, std::uint32_t end) {
    std::size_t kept = 0;
    while (kept < bytes.size()) {
        const std::size_t offset = kept + 8 + static_cast<std::size_t>(number_at(bytes, kept));
        if (number_at(bytes, offset) >= std::int64_t{end}) break;
        kept = offset + 16;
    }
    return std::string(bytes.substr(0, kept));
}

}  // namespace aiokv
