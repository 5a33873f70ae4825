// The least of a test framework: a list of functions and a check that ends the program with its place.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                        \
        }                                                                        \
    } while (false)

#define CHECK_EQUAL(left, right)                                                                           \
    do {                                                                                                   \
        auto left_value = (left);                                                                          \
        auto right_value = (right);                                                                        \
        if (!(left_value == right_value)) {                                                                \
            std::fprintf(stderr, "%s:%d: %s is %lld, %s is %lld\n", __FILE__, __LINE__, #left,             \
                         static_cast<long long>(left_value), #right, static_cast<long long>(right_value)); \
            std::exit(1);                                                                                  \
        }                                                                                                  \
    } while (false)
