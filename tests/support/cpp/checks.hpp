// What the programs check, and how they print what misuses are answered with.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <utility>

inline void require(bool condition, const char* text) {
  if (condition) return;
  std::fprintf(stderr, "not so: %s\n", text);
  std::exit(1);
}
#define REQUIRE(condition) require(condition, #condition)

template <typename Error>
void expect_error(decltype(std::declval<Error>().status()) status, const std::function<void()>& misuse) {
  try {
    misuse();
  } catch (const Error& error) {
    std::printf("%d %s\n", static_cast<int>(error.status()), error.what());
    REQUIRE(error.status() == status);
    return;
  }
  REQUIRE(!"an error was thrown");
}
