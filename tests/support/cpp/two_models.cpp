// Runs two models at the same time on the images of a file, and prints the scores of one, then of the other.

#include <class.hpp>
#include <digits.hpp>

#include <cstdio>
#include <fstream>
#include <thread>

template <typename Model>
void classify(const std::vector<float>& images, std::vector<float>& scores) {
  Model model;
  for (std::size_t image = 0; image < images.size() / 64; ++image) {
    const auto input = model.template input<float>(0);
    std::copy_n(images.begin() + static_cast<std::ptrdiff_t>(image * 64), 64, input.begin());
    model.run();
    const auto output = model.template output<float>("softmax_output");
    scores.insert(scores.end(), output.begin(), output.end());
  }
}

int main(int, char** words) {
  std::ifstream stream(words[1], std::ios::binary);
  std::vector<float> images(8 * 64), first, second;
  stream.read(reinterpret_cast<char*>(images.data()), static_cast<std::streamsize>(images.size() * sizeof(float)));
  std::thread other([&] { classify<class_::Model>(images, second); });
  classify<digits::Model>(images, first);
  other.join();
  for (const auto* scores : {&first, &second}) {
    for (const float score : *scores) std::printf("%.9g\n", static_cast<double>(score));
  }
}
