// SPDX-License-Identifier: Apache-2.0
#include "disk/served.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "blobfs/settings.h"

namespace dsec::disk {
namespace {

using nlohmann::json;

}  // namespace

std::string EncodeServed(const std::vector<Served>& all) {
  json lines = json::array();
  for (const Served& one : all) {
    lines.push_back({{"node", one.node}, {"bytes", one.bytes}, {"dir", one.dir}, {"nbd", one.nbd}});
  }
  return lines.dump(-1, ' ', false, json::error_handler_t::replace);
}

Result<std::vector<Served>> ParseServed(std::string_view text) {
  const Error corrupt(Code::kInternal, "disk.corrupt", "the record of served disks");
  std::vector<Served> all;
  if (text.empty()) return all;
  const json lines = json::parse(text, nullptr, false);
  if (!lines.is_array() || lines.size() > kMaxServed) return corrupt;
  try {
    for (const json& line : lines) {
      Served one;
      one.node = line.at("node").get<uint64_t>();
      one.bytes = line.at("bytes").get<uint64_t>();
      one.dir = line.at("dir").get<std::string>();
      one.nbd = line.at("nbd").get<std::string>();
      all.push_back(std::move(one));
    }
  } catch (const json::exception&) {
    return corrupt;
  }
  return all;
}

Error DiskErrorOf(std::string_view reason, std::string message) {
  constexpr std::pair<std::string_view, Code> kKnown[] = {
      {"disk.bad_layer", Code::kInvalidArgument},
      {"disk.bad_chain", Code::kInvalidArgument},
      {"disk.bad_socket", Code::kInvalidArgument},
      {"disk.bad_request", Code::kInvalidArgument},
      {"disk.out_of_range", Code::kInvalidArgument},
      {"disk.not_served", Code::kNotFound},
      {"disk.in_use", Code::kConflict},
      {"disk.collapsing", Code::kConflict},
      {"disk.no_space", Code::kResourceExhausted},
      {"disk.too_many_layers", Code::kResourceExhausted},
      {"disk.too_many_served", Code::kResourceExhausted},
      {"disk.corrupt", Code::kInternal},
      {"os.open", Code::kNotFound}};
  for (const auto& [known, code] : kKnown) {
    if (reason == known) return Error(code, known, std::move(message));
  }
  if (reason.starts_with("layer.")) return blobfs::ErrorOf(reason, std::move(message));
  return Error(Code::kInternal, "disk.io", std::move(message));
}

}  // namespace dsec::disk
