#include "aiokv/hot_prefixes.hpp"

#include <queue>
#include <tuple>

namespace aiokv {
namespace {

// Each read may miss the caches: 4,096 reads take about 0.5 ms.
constexpr std::size_t kMaxReads = 4096;
constexpr std::size_t kMaxSlots = 1024;     // most children of one fork that are visited
constexpr std::uint32_t kMaxStretch = 512;  // most blocks per stretch; the rest begins a new one

struct Candidate {
    std::uint32_t uses;
    std::uint32_t refs;
    std::uint32_t first_block;
    NodeId node;
    std::size_t parent;
    std::string_view context;

    // The greatest candidate is read next: the hottest one, and of equally hot ones the one nearest
    // to a root.
    bool operator<(const Candidate& other) const {
        return std::tuple(uses, refs, other.first_block, other.node) <
               std::tuple(other.uses, other.refs, first_block, node);
    }
};

class Walk {
  public:
    Walk(const Index& index, std::size_t limit) : index_(index), tree_(index.tree()) {
        index.for_some_roots(kMaxSlots, [this](NodeId root) {
            add_children(root, HotPrefix::kNoParent, index_.context_of_root(root), 0);
        });
        found_.complete = index.num_contexts() <= kMaxSlots;
        while (found_.prefixes.size() < limit && !candidates_.empty()) {
            const Candidate next = candidates_.top();
            candidates_.pop();
            follow(next);
        }
        if (reads_ >= kMaxReads) found_.complete = false;
        found_.complete = found_.complete && !is_sample_;
    }

    HotPrefixes take() { return std::move(found_); }

  private:
    void add_children(NodeId node, std::size_t parent, std::string_view context,
                      std::uint32_t first_block) {
        const std::size_t room = std::min(kMaxSlots, kMaxReads - std::min(reads_, kMaxReads));
        std::uint32_t seen = 0;
        reads_ += tree_.for_some_children(node, room, [&](NodeId child) {
            const Node& n = tree_[child];
            candidates_.push({n.uses, tree_.refs(child), first_block, child, parent, context});
            ++seen;
        });
        is_sample_ = is_sample_ || seen < tree_.children(node);
    }

    void follow(const Candidate& first) {
        HotPrefix prefix{.parent = first.parent,
                         .node = first.node,
                         .context = first.context,
                         .first_block = first.first_block,
                         .uses = first.uses,
                         .refs = first.refs};
        NodeId node = first.node;
        for (;; node = tree_.only_child(node)) {
            const Node& n = tree_[node];
            ++prefix.blocks;
            prefix.device_blocks += n.has(kDeviceValid);
            prefix.host_blocks += n.has(kHostValid);
            ++reads_;
            const NodeId next = tree_.only_child(node);
            if (next == kNone || tree_[next].uses != first.uses) break;
            if (prefix.blocks == kMaxStretch || reads_ >= kMaxReads) break;
        }
        prefix.children = tree_.children(node);
        found_.prefixes.push_back(prefix);
        add_children(node, found_.prefixes.size() - 1, first.context,
                     first.first_block + prefix.blocks);
    }

    const Index& index_;
    const PrefixTree& tree_;
    std::priority_queue<Candidate> candidates_;
    HotPrefixes found_;
    std::size_t reads_ = 0;
    bool is_sample_ = false;
};

}  // namespace

HotPrefixes hottest_prefixes(const Index& index, std::size_t limit) {
    return Walk(index, limit).take();
}

}  // namespace aiokv
