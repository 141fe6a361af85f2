// The whole test framework: TEST(name) {...} registers, CHECK and CHECK_EQ report and go on, and
// main() fails when any check did. CHECK_THROWS(type, expression) wants that exception.
#pragma once

#include <cstdio>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Test {
    const char* name;
    void (*body)();
};

inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

inline int& failures() {
    static int count = 0;
    return count;
}

inline bool add(const char* name, void (*body)()) {
    tests().push_back({name, body});
    return true;
}

inline void fail(const char* file, int line, const std::string& what) {
    std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
    ++failures();
}

template <typename A, typename B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
    if (a == b) return;
    std::ostringstream message;
    message << text << ": " << a << " != " << b;
    fail(file, line, message.str());
}

inline int run() {
    for (const auto& test : tests()) {
        const int before = failures();
        try {
            test.body();
        } catch (const std::exception& e) {
            fail(test.name, 0, std::string("unexpected exception: ") + e.what());
        }
        std::printf("%s %s\n", failures() == before ? "ok  " : "FAIL", test.name);
    }
    return failures() == 0 && !tests().empty() ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                                        \
    static void test_##name();                                            \
    static const bool registered_##name = check::add(#name, test_##name); \
    static void test_##name()

#define CHECK(condition) \
    ((condition) ? void() : check::fail(__FILE__, __LINE__, "CHECK(" #condition ")"))

#define CHECK_EQ(a, b) check::equal((a), (b), "CHECK_EQ(" #a ", " #b ")", __FILE__, __LINE__)

#define CHECK_THROWS(type, ...)                                                \
    do {                                                                       \
        bool thrown = false;                                                   \
        try {                                                                  \
            (void)(__VA_ARGS__);                                               \
        } catch (const type&) {                                                \
            thrown = true;                                                     \
        }                                                                      \
        if (!thrown) check::fail(__FILE__, __LINE__, #type " was not thrown"); \
    } while (false)

int main() {
    return check::run();
}
