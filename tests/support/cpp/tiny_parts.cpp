// Runs a model in two parts as one, and its parts one after the other; fails where they do not agree.

#include <tiny-features.hpp>
#include <tiny-scores.hpp>
#include <tiny.hpp>

#include <cstdio>
#include <set>

int main() {
  std::vector<float> data(tiny::Model::inputs()[0].size(), 0.25f), middle(tiny_features::Model::outputs()[0].size());
  std::vector<float> scores(tiny::Model::outputs()[0].size()), again(scores);
  tiny::Model model;
  model.run({data}, {scores});
  tiny_features::Model features;
  tiny_scores::Model last;
  features.run({data}, {{"r", middle}});
  last.run({middle}, {again});
  if (scores != again) return 1;
  std::set<std::string> parts;
  model.profile([&](std::string_view kernel, std::uint64_t) { parts.emplace(kernel.substr(0, kernel.find(':'))); });
  model.run({data}, {again});
  if (parts != std::set<std::string>{"features", "scores"} || scores != again) return 2;
  try {
    // written by the last part while the data may still be read
    model.run({data}, {tiny::Span<float>(data.data() + 2, scores.size())});
  } catch (const tiny::Error& error) {
    std::puts(error.what());
    return error.status() == tiny::Status::overlap ? 0 : 3;
  }
  return 4;
}
