#include <algorithm>
#include <cstring>
#include <future>
#include <numeric>
#include <random>

#include "aiokv/cache_lines.hpp"
#include "aiokv/copy.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

using Ids = std::vector<std::int32_t>;

// Two layers, regions of 33 and 17 bytes in the first and one of 33 in the second, odd strides.
struct Pools {
    static constexpr std::int64_t kHost = 23, kDevice = 19;
    static constexpr std::size_t kHostStride = 101, kDeviceStride = 40;
    std::vector<unsigned char> host = filled(kHost * kHostStride, 1);
    std::vector<unsigned char> device[3] = {filled(kDevice * kDeviceStride, 2),
                                            filled(kDevice * kDeviceStride, 3),
                                            filled(kDevice * kDeviceStride, 4)};
    std::shared_ptr<BlockMap> map = std::make_shared<BlockMap>();

    static std::vector<unsigned char> filled(std::size_t bytes, unsigned seed) {
        std::mt19937 random(seed);
        std::vector<unsigned char> out(bytes);
        for (auto& byte : out) byte = static_cast<unsigned char>(random());
        return out;
    }

    Pools() {
        auto at = [&](int i) { return reinterpret_cast<std::uintptr_t>(device[i].data()); };
        map->layers = {{{at(0), kDeviceStride, 33, 0}, {at(1), kDeviceStride, 17, 33}},
                       {{at(2), kDeviceStride, 33, 60}}};
        map->host_base = reinterpret_cast<std::uintptr_t>(host.data());
        map->host_stride = kHostStride;
        map->host_blocks = kHost;
        map->device_blocks = kDevice;
        map->check();
    }

    // The specification: one memcpy for each block and piece.
    void copy_plainly(Direction direction, const Ids& host_ids, const Ids& device_ids) {
        constexpr std::size_t bytes[3] = {33, 17, 33}, offsets[3] = {0, 33, 60};
        for (std::size_t i = 0; i < host_ids.size(); ++i) {
            for (int p = 0; p < 3; ++p) {
                auto* h = host.data() + host_ids[i] * kHostStride + offsets[p];
                auto* d = device[p].data() + device_ids[i] * kDeviceStride;
                if (direction == Direction::kOnload) {
                    std::memcpy(d, h, bytes[p]);
                } else {
                    std::memcpy(h, d, bytes[p]);
                }
            }
        }
    }

    bool operator==(const Pools& other) const {
        return host == other.host && std::equal(device, device + 3, other.device);
    }
};

void check_copy(Direction direction, const Ids& host_ids, const Ids& device_ids) {
    Pools moved, wanted;
    Stream stream("test");
    auto job = copy_blocks(stream, moved.map, direction, host_ids, device_ids);
    job->events().back()->synchronize();
    wanted.copy_plainly(direction, host_ids, device_ids);
    CHECK(moved == wanted);
    CHECK(!job->error());
}

Ids range(int first, int count) {
    Ids ids(static_cast<std::size_t>(count));
    std::iota(ids.begin(), ids.end(), first);
    return ids;
}

// A stream held up until open() is called.
struct Gate {
    std::promise<void> promise;
    std::shared_future<void> future = promise.get_future().share();
    explicit Gate(Stream& stream) {
        stream.push([f = future](const std::atomic<bool>&) { f.wait(); });
    }
    void open() { promise.set_value(); }
};

}  // namespace

TEST(bytes_arrive_and_nothing_else_changes) {
    for (const auto direction : {Direction::kOnload, Direction::kOffload}) {
        check_copy(direction, {5}, {0});
        check_copy(direction, range(3, 9), range(7, 9));
        check_copy(direction, range(0, 19), range(0, 19));
        Ids reversed = range(2, 11);
        std::reverse(reversed.begin(), reversed.end());
        check_copy(direction, reversed, range(1, 11));
        std::mt19937 random(7);
        for (int round = 0; round < 20; ++round) {
            Ids host_ids = range(0, 23), device_ids = range(0, 19);
            std::shuffle(host_ids.begin(), host_ids.end(), random);
            std::shuffle(device_ids.begin(), device_ids.end(), random);
            host_ids.resize(13);
            device_ids.resize(13);
            check_copy(direction, host_ids, device_ids);
        }
    }
}

TEST(a_source_may_be_listed_twice) {
    check_copy(Direction::kOnload, {4, 4, 5}, {1, 2, 3});
    check_copy(Direction::kOffload, {1, 2, 3}, {4, 4, 5});
}

TEST(dense_runs_and_streaming_stores_copy_equal_bytes) {
    constexpr std::size_t kBytes = 24'001, kBlocks = 800;  // 19 MB: over the streaming threshold
    auto host = Pools::filled(kBytes * kBlocks, 5), device = Pools::filled(kBytes * kBlocks, 6);
    auto map = std::make_shared<BlockMap>();
    map->layers = {{{reinterpret_cast<std::uintptr_t>(device.data()), kBytes, kBytes, 0}}};
    map->host_base = reinterpret_cast<std::uintptr_t>(host.data());
    map->host_stride = kBytes;
    map->host_blocks = map->device_blocks = kBlocks;
    Stream stream("test");
    auto wanted = host;
    copy_blocks(stream, map, Direction::kOnload, range(0, 800), range(0, 800));
    stream.synchronize();
    CHECK(device == wanted);
    std::fill(host.begin(), host.end(), 0);
    Ids odd = range(0, 800);
    std::swap(odd[3], odd[500]);
    copy_blocks(stream, map, Direction::kOffload, odd, odd);
    stream.synchronize();
    CHECK(host == wanted);
}

TEST(copy_bytes_at_every_alignment) {
    const auto source = Pools::filled(5000, 8);
    for (std::size_t to = 0; to < 65; to += 3) {
        for (const std::size_t bytes : {0, 1, 63, 1023, 1024, 1025, 4099}) {
            std::vector<unsigned char> target(5200, 0xAA), wanted = target;
            std::memcpy(wanted.data() + to, source.data() + 5, bytes);
            copy_bytes(target.data() + to, source.data() + 5, bytes, true);
            streaming_fence();
            CHECK(target == wanted);
        }
    }
}

TEST(runs_join_blocks_adjacent_on_both_sides_only) {
    CHECK_EQ(merge_runs(range(3, 5), range(9, 5)).size(), 1u);
    CHECK_EQ(merge_runs(Ids{3, 4, 6}, Ids{7, 8, 9}).size(), 2u);
    CHECK_EQ(merge_runs(Ids{3, 4, 5}, Ids{7, 9, 8}).size(), 3u);
    const auto sorted = merge_runs(Ids{5, 4, 3}, Ids{9, 8, 7});
    CHECK_EQ(sorted.size(), 1u);
    CHECK_EQ(sorted[0].host, 3);
    CHECK_EQ(sorted[0].device, 7);
}

TEST(bad_ids_are_refused_before_a_byte_moves) {
    Pools pools, untouched;
    Stream stream("test");
    auto copy = [&](Direction direction, const Ids& host_ids, const Ids& device_ids) {
        return copy_blocks(stream, pools.map, direction, host_ids, device_ids);
    };
    CHECK_THROWS(UsageError, copy(Direction::kOnload, {}, {}));
    CHECK_THROWS(UsageError, copy(Direction::kOnload, {1, 2}, {1}));
    CHECK_THROWS(UsageError, copy(Direction::kOnload, {1, 23}, {1, 2}));
    CHECK_THROWS(UsageError, copy(Direction::kOnload, {1, 2}, {1, 19}));
    CHECK_THROWS(UsageError, copy(Direction::kOnload, {1, -1}, {1, 2}));
    CHECK_THROWS(UsageError, copy(Direction::kOnload, {1, 2}, {3, 3}));
    CHECK_THROWS(UsageError, copy(Direction::kOffload, {3, 3}, {1, 2}));
    stream.synchronize();
    CHECK(pools == untouched);
}

TEST(a_piece_must_fit_its_block) {
    Pools pools;
    auto& piece = pools.map->layers[0][0];
    piece.bytes = 41;
    CHECK_THROWS(LayoutError, pools.map->check());
    piece.bytes = 33;
    piece.host_offset = 69;
    CHECK_THROWS(LayoutError, pools.map->check());
    piece.host_offset = 0;
    pools.map->check();
}

TEST(an_onload_has_one_event_per_layer_and_an_offload_has_one) {
    Pools pools;
    Stream stream("test");
    CHECK_EQ(copy_blocks(stream, pools.map, Direction::kOnload, Ids{1}, Ids{1})->events().size(),
             2u);
    CHECK_EQ(copy_blocks(stream, pools.map, Direction::kOffload, Ids{1}, Ids{1})->events().size(),
             1u);
}

TEST(an_event_is_done_after_all_its_openings_finished) {
    Event event;
    CHECK(!event.done());
    CHECK_THROWS(UsageError, (event.synchronize(), 0));
    Stream stream("test");
    CHECK_THROWS(UsageError, (stream.wait_event(std::make_shared<Event>()), 0));
    const auto first = event.open();
    const auto second = event.open();
    event.finish(first);
    CHECK(!event.done());
    event.finish(second, "broken");
    CHECK(event.done());
    CHECK_EQ(event.error(), "broken");
    CHECK(event.finished_ns() > 0);
    event.open();
    CHECK(!event.done());
    CHECK_EQ(event.error(), "");
}

TEST(a_copy_waits_for_its_preceding_event) {
    Pools pools, untouched;
    Stream compute("compute"), copies("copies");
    Gate gate(compute);
    auto step = std::make_shared<Event>();
    compute.record(step);
    auto job = copy_blocks(copies, pools.map, Direction::kOnload, Ids{1}, Ids{2}, step);
    CHECK(!job->events()[0]->done());
    CHECK(pools == untouched);
    gate.open();
    job->events()[1]->synchronize();
    CHECK(!(pools == untouched));
}

TEST(a_failed_event_fails_the_copy_behind_it) {
    Pools pools, untouched;
    auto step = std::make_shared<Event>();
    step->finish(step->open(), "no such kernel");
    Stream stream("test");
    auto job = copy_blocks(stream, pools.map, Direction::kOffload, Ids{1}, Ids{2}, step);
    job->events()[0]->synchronize();
    CHECK(job->error().has_value());
    CHECK(job->error()->reason.find("no such kernel") != std::string::npos);
    CHECK(pools == untouched);
}

TEST(abort_fails_queued_work_and_ends_waits) {
    Pools pools, untouched;
    Stream compute("compute"), copies("copies");
    Gate gate(compute);
    auto step = std::make_shared<Event>();
    compute.record(step);
    auto job = copy_blocks(copies, pools.map, Direction::kOnload, Ids{1}, Ids{2}, step);
    copies.abort();
    CHECK(job->events()[0]->done() && job->events()[1]->done());
    CHECK(job->error().has_value());
    CHECK(job->events()[1]->error() != "");
    CHECK(pools == untouched);
    CHECK_THROWS(UsageError, copies.push([](const std::atomic<bool>&) {}));
    gate.open();
}

TEST(close_completes_queued_work) {
    Pools pools, wanted;
    Stream stream("test");
    auto job = copy_blocks(stream, pools.map, Direction::kOnload, Ids{1, 2}, Ids{4, 3});
    stream.close();
    stream.close();
    CHECK(job->events()[1]->done());
    wanted.copy_plainly(Direction::kOnload, {1, 2}, {4, 3});
    CHECK(pools == wanted);
    CHECK_EQ(stream.depth(), 0u);
}

TEST(both_directions_copy_at_once) {
    Pools pools, wanted;
    Stream in("in"), out("out");
    for (int i = 0; i < 200; ++i) {
        copy_blocks(in, pools.map, Direction::kOnload, range(0, 8), range(0, 8));
        copy_blocks(out, pools.map, Direction::kOffload, range(10, 8), range(10, 8));
    }
    in.synchronize();
    out.synchronize();
    wanted.copy_plainly(Direction::kOnload, range(0, 8), range(0, 8));
    wanted.copy_plainly(Direction::kOffload, range(10, 8), range(10, 8));
    CHECK(pools == wanted);
}
