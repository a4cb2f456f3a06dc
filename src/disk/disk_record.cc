// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>

#include "disk/disk.h"
#include "image/digest.h"

namespace dsec::disk {
namespace {

using nlohmann::json;

constexpr int kFormat = 1;
constexpr size_t kMaxPath = 4095;

Error Corrupt(std::string_view what) {
  return Error(Code::kInternal, "disk.corrupt", fmt::format("disk.json: {}", what));
}

// A name in the folder, or an absolute path.
bool IsFile(const std::string& file) {
  if (file.empty() || file.size() > kMaxPath || file.find('\0') != file.npos) return false;
  return file[0] == '/' || (file.find('/') == file.npos && file[0] != '.');
}

}  // namespace

std::string DiskRecord::Encode() const {
  json object = {
      {"format", kFormat}, {"bytes", bytes}, {"upper", upper}, {"lowers", json::array()}};
  for (const LowerName& lower : lowers) {
    object["lowers"].push_back(lower.published.empty() ? json{{"file", lower.file}}
                                                       : json{{"published", lower.published}});
  }
  return object.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

Result<DiskRecord> DiskRecord::Parse(std::string_view text) {
  const json object = json::parse(text, nullptr, false);
  if (!object.is_object()) return Corrupt("is no JSON object");
  const auto format = object.find("format");
  if (format == object.end() || *format != kFormat)
    return Corrupt(fmt::format("format is not {}", kFormat));
  const auto size = object.find("bytes");
  const auto upper = object.find("upper");
  const auto lowers = object.find("lowers");
  if (size == object.end() || !size->is_number_unsigned() ||
      !CheckDiskBytes(size->get<uint64_t>()).ok())
    return Corrupt("bytes is not the size of a disk");
  if (upper == object.end() || !upper->is_string() || !IsUuid(upper->get<std::string>()))
    return Corrupt("upper is no uuid");
  if (lowers == object.end() || !lowers->is_array() || lowers->size() > kMaxLayers)
    return Corrupt(fmt::format("lowers is no array of {} at most", kMaxLayers));
  DiskRecord record;
  record.bytes = size->get<uint64_t>();
  record.upper = upper->get<std::string>();
  for (const json& item : *lowers) {
    LowerName name;
    if (item.is_object() && item.size() == 1) {
      if (item.contains("file") && item["file"].is_string())
        name.file = item["file"].get<std::string>();
      if (item.contains("published") && item["published"].is_string())
        name.published = item["published"].get<std::string>();
    }
    if (!IsFile(name.file) && !image::IsSha256Hex(name.published))
      return Corrupt(
          fmt::format("lowers[{}] names no file and no published layer", record.lowers.size()));
    record.lowers.push_back(std::move(name));
  }
  return record;
}

}  // namespace dsec::disk
