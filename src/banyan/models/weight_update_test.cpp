// An update is wholly new or wholly old: everything that does not fit is found before a master
// changes. Memory of masters and forms goes and comes back.
#include "banyan/models/weight_update.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include "banyan/io/files.h"
#include "banyan/io/test_support.h"
#include "banyan/models/test_models.h"

namespace banyan::models {
namespace {

namespace fs = std::filesystem;
using io::file_error_of;
using io::TempDirectory;

const LoadOptions kBf16 = {{.dtype = at::kBFloat16}, false};

void write_model(const TempDirectory& folder, const std::string& name, uint64_t seed) {
  fs::create_directories(folder / "source");
  io::write_bytes(folder / "source/config.json", tiny_configs()[4].second);
  auto model = random_model(tiny_configs()[4].second, seed, kBf16);
  save_model(*model, folder / "source", folder / name, at::kBFloat16);
}

std::unique_ptr<CausalLM> model_in_use() {
  return random_model(tiny_configs()[4].second, 1, kBf16);
}

at::Tensor output(CausalLM& model) {
  Batch batch(samples_of({{1, 2, 3, 4}, {1, 2, 9}}), true, model.options());
  return model.forward(batch.ids(), batch.positions(), batch.attention, nullptr);
}

int64_t bytes_of(const std::vector<c10::Storage>& memory) {
  int64_t total = 0;
  for (const c10::Storage& storage : memory) total += static_cast<int64_t>(storage.nbytes());
  return total;
}

// Changes the tensors of a saved model.
void rewrite(const TempDirectory& folder,
             const std::string& name,
             const std::function<void(std::vector<io::NamedTensor>&)>& change) {
  const std::string path = folder / (name + "/model.safetensors");
  std::vector<io::NamedTensor> tensors;
  {
    const io::SafetensorsFile file(path);
    for (const auto& [tensor, entry] : file.entries())
      tensors.push_back({tensor, file.read(tensor)});
  }
  change(tensors);
  fs::remove(path);
  io::write_safetensors(path, tensors, {{"format", "pt"}});
}

TEST(WeightUpdate, BringsTheValuesOfTheFiles) {
  const TempDirectory folder;
  write_model(folder, "new", 2);
  for (const bool read_first : {true, false}) {
    const auto model = model_in_use();
    const auto before = weight_checksums(*model);
    WeightUpdate update(*model, folder / "new");
    EXPECT_GT(update.num_bytes(), 0);
    if (read_first) update.read();
    EXPECT_EQ(weight_checksums(*model), before);
    update.commit();
    const auto loaded = load_model(folder / "new", kBf16);
    EXPECT_EQ(weight_checksums(*model), weight_checksums(*loaded));
    EXPECT_NE(weight_checksums(*model), before);
    EXPECT_TRUE(output(*model).equal(output(*loaded)));
  }
}

// Files that are replaced after they were read change nothing.
TEST(WeightUpdate, NeedsNoFileAfterReading) {
  const TempDirectory folder;
  write_model(folder, "new", 2);
  const auto loaded = load_model(folder / "new", kBf16);
  const auto model = model_in_use();
  WeightUpdate update(*model, folder / "new");
  update.read();
  fs::remove_all(folder / "new");
  update.commit();
  EXPECT_EQ(weight_checksums(*model), weight_checksums(*loaded));
}

TEST(WeightUpdate, WhatDoesNotFitChangesNothing) {
  const auto refused = [](const auto& change) {
    const TempDirectory folder;
    write_model(folder, "new", 2);
    change(folder);
    const auto model = model_in_use();
    const auto before = weight_checksums(*model);
    const std::string error = file_error_of([&] {
      WeightUpdate update(*model, folder / "new");
      update.read();
      update.commit();
    });
    EXPECT_EQ(weight_checksums(*model), before);
    return error;
  };
  const auto has = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << "wanted: " << part << "\ngot: " << text;
  };
  has(refused([](const TempDirectory& folder) {
        rewrite(folder, "new", [](auto& tensors) { tensors.pop_back(); });
      }),
      "; missing: ");
  has(refused([](const TempDirectory& folder) {
        rewrite(folder, "new", [](auto& tensors) {
          tensors.push_back({"model.extra", at::zeros({2})});
        });
      }),
      "; unexpected: model.extra");
  has(refused([](const TempDirectory& folder) {
        rewrite(folder, "new", [](auto& tensors) { tensors[0].tensor = at::zeros({2}); });
      }),
      "; of another shape: ");
  has(refused([](const TempDirectory& folder) {
        rewrite(folder, "new", [](auto& tensors) {
          tensors[0].tensor = at::zeros(tensors[0].tensor.sizes(), at::kInt);
        });
      }),
      "wanted F32, BF16, F16 or F64, got I32");
  has(refused([](const TempDirectory& folder) {
        rewrite(folder, "new", [](auto& tensors) {
          tensors.back().tensor = at::full_like(tensors.back().tensor, std::nan(""));
        });
      }),
      "wanted finite numbers, got NaN or infinity");
  has(refused([](const TempDirectory& folder) {
        const std::string path = folder / "new/model.safetensors";
        fs::resize_file(path, fs::file_size(path) - 100);
      }),
      "model.safetensors: ");
  has(refused([](const TempDirectory& folder) {
        io::write_bytes(folder / "new/config.json", tiny_configs()[0].second);
      }),
      "config.json: model_type: wanted qwen3 as in the model in use, got llama");
  has(refused([](const TempDirectory& folder) { fs::remove_all(folder / "new"); }),
      "holds neither model.safetensors");
}

TEST(WeightUpdate, FillsMastersWhoseMemoryWasGivenBack) {
  const TempDirectory folder;
  write_model(folder, "new", 2);
  const auto loaded = load_model(folder / "new", kBf16);
  const auto model = model_in_use();
  ParamTable& table = model->params();
  // fp32 masters and bf16 forms
  EXPECT_GE(bytes_of(table.take_masters()), table.num_elements() * 6);
  EXPECT_TRUE(table.take_masters().empty());
  EXPECT_FALSE(table.has_forms());
  WeightUpdate update(*model, folder / "new");
  update.commit();
  EXPECT_TRUE(table.has_forms());
  EXPECT_EQ(weight_checksums(*model), weight_checksums(*loaded));
  EXPECT_TRUE(output(*model).equal(output(*loaded)));
}

TEST(WeightUpdate, FormsAreRebuiltFromTheMasters) {
  for (const auto& [name, config] : tiny_configs()) {
    for (const ComputeOptions& compute :
         {ComputeOptions{.dtype = at::kBFloat16}, ComputeOptions{.dtype = at::kFloat}}) {
      const auto model = random_model(config, 1, {compute, true});
      const at::Tensor before = output(*model);
      const int64_t num_bytes = bytes_of(model->params().take_forms());
      EXPECT_EQ(num_bytes > 0, compute.dtype == at::kBFloat16) << name;
      EXPECT_TRUE(model->params().take_forms().empty());
      model->params().repack();
      EXPECT_TRUE(output(*model).equal(before)) << name;
    }
  }
}

}  // namespace
}  // namespace banyan::models
