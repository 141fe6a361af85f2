// Digests of blocks, keys, and the trailers of objects in stores.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "aiokv/error.hpp"
#include "aiokv/item_keys.hpp"
#include "aiokv/trailer.hpp"
#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace aiokv {
namespace {

using IdArray = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ResultArray = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;
using ItemTuple = std::tuple<nb::bytes, std::int64_t, std::int64_t>;

std::span<const std::uint8_t> view(const nb::bytes& bytes) {
    return {static_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
}

std::span<const std::int32_t> view(const IdArray& array) {
    return {array.data(), array.size()};
}

nb::bytes as_bytes(const std::vector<Digest>& digests) {
    return nb::bytes(digests.data(), digests.size() * sizeof(Digest));
}

Digest digest_of(const char* name, const nb::bytes& bytes) {
    Digest digest;
    if (bytes.size() != digest.size()) {
        throw UsageError(std::string(name) + " has " + std::to_string(bytes.size()) +
                         " bytes; it must have " + std::to_string(digest.size()));
    }
    std::memcpy(digest.data(), bytes.data(), digest.size());
    return digest;
}

void check_block_tokens(std::int64_t block_tokens) {
    constexpr std::int64_t kMaxBlockTokens =
        (std::int64_t{1} << 30) - 1;  // the limit of CacheConfig
    if (block_tokens < 1 || block_tokens > kMaxBlockTokens) {
        throw UsageError("block_tokens is " + std::to_string(block_tokens) +
                         "; it must be between 1 and " + std::to_string(kMaxBlockTokens));
    }
}

Sha256Blocks implementation(bool portable) {
    return portable ? sha256_blocks_portable : sha256_blocks_fastest();
}

nb::bytes root(std::int64_t block_tokens, std::string_view context) {
    check_block_tokens(block_tokens);
    const Digest digest = root_digest(static_cast<std::uint32_t>(block_tokens), context);
    return nb::bytes(digest.data(), digest.size());
}

nb::bytes digests(const nb::bytes& root, const IdArray& tokens, std::int64_t block_tokens,
                  const std::vector<ItemTuple>& tuples, bool portable) {
    check_block_tokens(block_tokens);
    Digest parent = digest_of("root", root);
    std::vector<Item> items;
    for (const auto& [hash, offset, length] : tuples) {
        items.push_back({{hash.c_str(), hash.size()}, offset, length});
    }
    check_items(items, 0, tokens.size());
    std::vector<Digest> digests;
    {
        nb::gil_scoped_release released;
        const std::size_t num_tokens = static_cast<std::size_t>(block_tokens);
        const std::vector<std::string> keys =
            item_key_bytes(items, static_cast<std::uint32_t>(block_tokens));
        const Sha256Blocks add_blocks = implementation(portable);
        digests.resize(tokens.size() / num_tokens);
        for (std::size_t i = 0; i < digests.size(); ++i) {
            const std::string_view key = i < keys.size() ? keys[i] : std::string_view();
            parent = block_digest(parent, view(tokens).subspan(i * num_tokens, num_tokens), key,
                                  add_blocks);
            digests[i] = parent;
        }
    }
    return as_bytes(digests);
}

nb::bytes keys(const nb::bytes& fingerprint, const nb::bytes& digests, bool portable) {
    const Digest first = digest_of("fingerprint", fingerprint);
    if (digests.size() % sizeof(Digest) != 0) {
        throw UsageError("digests has " + std::to_string(digests.size()) +
                         " bytes; it must be a multiple of " + std::to_string(sizeof(Digest)));
    }
    const std::span source(static_cast<const Digest*>(digests.data()),
                           digests.size() / sizeof(Digest));
    std::vector<Digest> derived(source.size());
    {
        nb::gil_scoped_release released;
        derive_keys(first, source, derived, implementation(portable),
                    portable ? nullptr : sha256_two_messages_native());
    }
    return as_bytes(derived);
}

ObjectBlocks object_blocks(std::uintptr_t address, std::uint64_t pitch_bytes,
                           std::uint64_t payload_bytes, std::uint64_t num_blocks) {
    return {reinterpret_cast<std::uint8_t*>(address), num_blocks, pitch_bytes, payload_bytes};
}

void seal(std::uintptr_t address, std::uint64_t pitch_bytes, std::uint64_t payload_bytes,
          const IdArray& blocks, const nb::bytes& keys, std::uint64_t num_blocks) {
    const ObjectBlocks objects = object_blocks(address, pitch_bytes, payload_bytes, num_blocks);
    const auto key_bytes = view(keys);
    nb::gil_scoped_release released;
    seal_blocks(objects, view(blocks), key_bytes);
}

ResultArray result_array(std::unique_ptr<StoreResult[]> results, std::size_t count) {
    StoreResult* data = results.release();
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<StoreResult*>(p); });
    return ResultArray(data, {count}, owner);
}

ResultArray verify(std::uintptr_t address, std::uint64_t pitch_bytes, std::uint64_t payload_bytes,
                   const IdArray& blocks, const nb::bytes& keys, std::uint64_t num_blocks) {
    const ObjectBlocks objects = object_blocks(address, pitch_bytes, payload_bytes, num_blocks);
    const auto key_bytes = view(keys);
    auto results = std::make_unique<StoreResult[]>(blocks.size() + 1);
    {
        nb::gil_scoped_release released;
        verify_blocks(objects, view(blocks), key_bytes, results.get());
    }
    return result_array(std::move(results), blocks.size());
}

// Address, distance and number of the blocks of one memory.
using Memory = std::tuple<std::uintptr_t, std::uint64_t, std::uint64_t>;

ResultArray copy(const Memory& source, const IdArray& source_blocks, const Memory& target,
                 const IdArray& target_blocks, std::uint64_t payload_bytes, const nb::bytes& keys) {
    const auto blocks_of = [&](const Memory& memory) {
        const auto& [address, pitch_bytes, num_blocks] = memory;
        return object_blocks(address, pitch_bytes, payload_bytes, num_blocks);
    };
    const ObjectBlocks from = blocks_of(source);
    const ObjectBlocks to = blocks_of(target);
    const auto key_bytes = view(keys);
    auto results = std::make_unique<StoreResult[]>(source_blocks.size() + 1);
    {
        nb::gil_scoped_release released;
        copy_objects(from, view(source_blocks), to, view(target_blocks), key_bytes, results.get());
    }
    return result_array(std::move(results), source_blocks.size());
}

// A borrowed buffer of any object that exports one.
class Buffer {
  public:
    explicit Buffer(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    ~Buffer() { PyBuffer_Release(&buffer_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    std::span<const std::uint8_t> bytes() const {
        return {static_cast<const std::uint8_t*>(buffer_.buf),
                static_cast<std::size_t>(buffer_.len)};
    }

  private:
    Py_buffer buffer_{};
};

bool verify_buffer(const nb::object& buffer, const nb::bytes& key) {
    const Digest digest = digest_of("key", key);
    const Buffer object(buffer);
    nb::gil_scoped_release released;
    return verify_object(object.bytes(), digest);
}

void init_writer(ObjectWriter* self, std::uintptr_t address, std::uint64_t pitch_bytes,
                 std::uint64_t payload_bytes, const IdArray& blocks, const nb::bytes& keys,
                 std::uint64_t num_blocks) {
    new (self) ObjectWriter(object_blocks(address, pitch_bytes, payload_bytes, num_blocks),
                            view(blocks), view(keys));
}

void write_piece(ObjectWriter& self, const nb::object& piece) {
    const Buffer bytes(piece);
    nb::gil_scoped_release released;
    self.write(bytes.bytes());
}

ResultArray writer_results(const ObjectWriter& self) {
    auto results = std::make_unique<StoreResult[]>(self.results().size() + 1);
    std::ranges::copy(self.results(), results.get());
    return result_array(std::move(results), self.results().size());
}

}  // namespace

void bind_digest(nb::module_& m) {
    m.def(
        "sha256_implementation",
        [] { return sha256_blocks_native() != nullptr ? "sha instructions" : "portable"; },
        "Name the implementation that digests use on this processor.");
    m.def("root_digest", &root, "block_tokens"_a, "context"_a,
          "Return the digest (32 bytes) that the first blocks of prompts of a context chain to.");
    m.def(
        "salt_label",
        [](std::string_view salt) {
            const SaltLabel label = salt_label(salt);
            return nb::bytes(label.data(), label.size());
        },
        "salt"_a, "Return the label (5 bytes) at the end of the keys of a salt.");
    m.def("block_digests", &digests, "root"_a, "tokens"_a.noconvert(), "block_tokens"_a,
          "items"_a = nb::list(), nb::kw_only(), "portable"_a = false,
          "Return the digests of the whole blocks of a prompt, 32 bytes each; items are (hash, "
          "offset, length). portable=True does without special instructions. Raises UsageError.");
    m.def("derive_keys", &keys, "fingerprint"_a, "digests"_a, nb::kw_only(), "portable"_a = false,
          "Return the keys, 32 bytes each, of block digests in the stores of a fingerprint. Raises "
          "UsageError.");
    m.def(
        "seal_blocks", &seal, "address"_a, "pitch_bytes"_a, "payload_bytes"_a,
        "blocks"_a.noconvert(), "keys"_a, nb::kw_only(), "num_blocks"_a,
        "Write the trailers of host blocks behind their payloads. Block i of num_blocks begins at "
        "address + i * pitch_bytes. Call it in a thread: it releases the GIL and reads all "
        "payloads. Raises UsageError before the first access.");
    m.def("verify_blocks", &verify, "address"_a, "pitch_bytes"_a, "payload_bytes"_a,
          "blocks"_a.noconvert(), "keys"_a, nb::kw_only(), "num_blocks"_a,
          "Return Result.DONE or Result.WRONG for each block: whether its trailer is that of the "
          "key and of the payload. Arguments, threads and errors as of seal_blocks().");
    m.def("copy_objects", &copy, "source"_a, "source_blocks"_a.noconvert(), "target"_a,
          "target_blocks"_a.noconvert(), nb::kw_only(), "payload_bytes"_a, "keys"_a,
          "Copy the objects of blocks between two memories, each given by its address, pitch_bytes "
          "and num_blocks, and return for each copy what verify_blocks() would. Threads and errors "
          "as of seal_blocks().");
    m.def("verify_object", &verify_buffer, "buffer"_a, "key"_a,
          nb::sig("def verify_object(buffer: object, key: bytes) -> bool"),
          "Return True if a contiguous buffer is a payload and the trailer of the payload and key. "
          "Releases the GIL. Raises UsageError on a key of another length than 32 bytes.");
    nb::class_<ObjectWriter>(m, "ObjectWriter",
                             "Writes objects, whose bytes arrive in pieces, to host blocks, and "
                             "verifies each. Arguments and errors as of verify_blocks(). One "
                             "thread at a time may use it.")
        .def("__init__", &init_writer, "address"_a, "pitch_bytes"_a, "payload_bytes"_a,
             "blocks"_a.noconvert(), "keys"_a, nb::kw_only(), "num_blocks"_a)
        .def("write", &write_piece, "piece"_a, nb::sig("def write(self, piece: object) -> None"),
             "Append the next bytes, a contiguous buffer of any length; bytes behind the last "
             "object are ignored. Releases the GIL.")
        .def("results", &writer_results,
             "Return Result.DONE for each object that was written as a whole and is right, and "
             "Result.WRONG for the others.");
}

}  // namespace aiokv
