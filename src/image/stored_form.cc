// SPDX-License-Identifier: Apache-2.0
#include "image/stored_form.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "image/layer.h"

namespace dsec::image {
namespace {

using nlohmann::json;

constexpr int kFormat = 1;

std::optional<uint64_t> NumberAt(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number_unsigned()) return std::nullopt;
  return found->get<uint64_t>();
}

// nullopt: it does not have this shape.
std::optional<StoredForm> Read(const json& object) {
  if (!object.is_object() || NumberAt(object, "format") != kFormat) return std::nullopt;
  const json files = object.value("files", json());
  const json runs = object.value("runs", json());
  if (!files.is_array() || files.empty() || files.size() > StoredForm::kMaxFiles ||
      !runs.is_array() || runs.size() > StoredForm::kMaxRuns)
    return std::nullopt;
  StoredForm form;
  for (const json& item : files) {
    if (!item.is_object()) return std::nullopt;
    const json name = item.value("name", json());
    const auto size = NumberAt(item, "size");
    if (!name.is_string() || !size) return std::nullopt;
    form.files.push_back({name.get<std::string>(), *size});
  }
  for (const json& item : runs) {
    if (!item.is_array() || item.size() != 3) return std::nullopt;
    std::array<uint32_t, 3> numbers = {};
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (!item[i].is_number_unsigned() || item[i].get<uint64_t>() > UINT32_MAX)
        return std::nullopt;
      numbers[i] = item[i].get<uint32_t>();
    }
    form.runs.push_back({numbers[0], numbers[1], numbers[2]});
  }
  return form;
}

// What is wrong with it; empty: nothing.
std::string Fault(const StoredForm& form, uint64_t blob_bytes) {
  const size_t own = form.has_own() ? 1 : 0;
  for (size_t i = 0; i < form.files.size(); ++i) {
    const StoredForm::File& file = form.files[i];
    if (i >= own && file.name != StoredForm::SharedName(i - own + 1))
      return fmt::format("file {} is called \"{}\"", i, Printable(file.name));
    if (file.size == 0 || file.size % StoredForm::kBlock != 0 ||
        file.size / StoredForm::kBlock >= std::numeric_limits<uint32_t>::max())
      return fmt::format("{} has {} bytes", file.name, file.size);
  }
  for (const StoredForm::Run& run : form.runs) {
    if (run.file >= form.files.size() || run.blocks == 0 ||
        uint64_t{run.block} + run.blocks > form.files[run.file].size / StoredForm::kBlock)
      return fmt::format("a run of {} blocks at {} of file {}", run.blocks, run.block, run.file);
  }
  if (form.blocks() * StoredForm::kBlock != blob_bytes)
    return fmt::format("its runs have {} blocks, the content {} bytes", form.blocks(), blob_bytes);
  return "";
}

}  // namespace

std::string StoredForm::SharedName(size_t number) { return fmt::format("shared.{}.blob", number); }

uint64_t StoredForm::blocks() const {
  uint64_t total = 0;
  for (const Run& run : runs) total += run.blocks;
  return total;
}

uint64_t StoredForm::shared_blocks() const {
  uint64_t total = 0;
  for (const Run& run : runs) {
    if (!has_own() || run.file != 0) total += run.blocks;
  }
  return total;
}

std::string StoredForm::Encode() const {
  json list = json::array();
  for (const File& file : files) list.push_back({{"name", file.name}, {"size", file.size}});
  json places = json::array();
  for (const Run& run : runs) places.push_back(json::array({run.file, run.block, run.blocks}));
  const json all = {{"files", std::move(list)}, {"format", kFormat}, {"runs", std::move(places)}};
  return all.dump(-1, ' ', false, json::error_handler_t::replace);
}

Result<StoredForm> StoredForm::Parse(std::string_view text, uint64_t blob_bytes) {
  const auto corrupt = [](std::string_view what) {
    return Error(Code::kInternal, "layer.corrupt", fmt::format("{}: {}", kFormName, what));
  };
  if (text.size() > kMaxText) return corrupt(fmt::format("{} bytes", text.size()));
  auto form = Read(json::parse(text, nullptr, false));
  if (!form || form->Encode() != text) return corrupt("not what this program writes");
  if (const std::string fault = Fault(*form, blob_bytes); !fault.empty()) return corrupt(fault);
  return *std::move(form);
}

FormMap::FormMap(const StoredForm& form) : runs_(form.runs) {
  uint64_t start = 0;
  starts_.reserve(runs_.size());
  for (const StoredForm::Run& run : runs_) {
    starts_.push_back(start);
    start += run.blocks;
  }
}

FormMap::Place FormMap::Find(uint64_t block) const {
  const auto next = std::ranges::upper_bound(starts_, block);
  if (next == starts_.begin()) return {};
  const auto index = static_cast<size_t>(next - starts_.begin()) - 1;
  const StoredForm::Run& run = runs_[index];
  const uint64_t into = block - starts_[index];
  if (into >= run.blocks) return {};
  return {run.file, run.block + static_cast<uint32_t>(into),
          run.blocks - static_cast<uint32_t>(into)};
}

}  // namespace dsec::image
