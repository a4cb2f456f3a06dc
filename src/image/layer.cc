// SPDX-License-Identifier: Apache-2.0
#include "image/layer.h"

#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "image/digest.h"

namespace dsec::image {
namespace {

using nlohmann::json;

constexpr int kOldestFormat = 1;
constexpr size_t kMaxNamePart = 128;

bool IsLowerAlnum(char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); }
bool IsAlnum(char c) { return IsLowerAlnum(c) || (c >= 'A' && c <= 'Z'); }

Error BadName(std::string_view text, std::string_view rule) {
  return Error(Code::kInvalidArgument, "layer.bad_name",
               fmt::format("\"{}\": {}", Printable(text), rule))
      .WithField("name");
}

json ConfigToJson(const ImageConfig& config) {
  return json{{"cmd", config.cmd},
              {"entrypoint", config.entrypoint},
              {"env", config.env},
              {"user", config.user},
              {"workdir", config.workdir}};
}

bool ReadString(const json& object, const char* key, std::string& out) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) return false;
  out = found->get<std::string>();
  return true;
}

bool ReadStrings(const json& object, const char* key, std::vector<std::string>& out) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_array()) return false;
  for (const json& item : *found) {
    if (!item.is_string()) return false;
    out.push_back(item.get<std::string>());
  }
  return true;
}

std::optional<ImageConfig> ConfigFromJson(const json& object) {
  ImageConfig config;
  if (!object.is_object() || !ReadStrings(object, "cmd", config.cmd) ||
      !ReadStrings(object, "entrypoint", config.entrypoint) ||
      !ReadStrings(object, "env", config.env) || !ReadString(object, "user", config.user) ||
      !ReadString(object, "workdir", config.workdir)) {
    return std::nullopt;
  }
  return config;
}

json FileToJson(const FileDigest& file) {
  return json{{"sha256", file.sha256}, {"size", file.size}};
}

bool ReadFile(const json& object, const char* key, FileDigest& out) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_object()) return false;
  const auto size = found->find("size");
  if (size == found->end() || !size->is_number_unsigned()) return false;
  out.size = size->get<uint64_t>();
  return ReadString(*found, "sha256", out.sha256) && IsSha256Hex(out.sha256);
}

// Strings come from JSON that was valid UTF-8 or from our own text; anything else must not throw
// here.
std::string Dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

bool ReadChunks(const json& object, ChunkDigests& out) {
  FileDigest read;
  if (!ReadFile(object.at("blob"), "chunks", read) || read.size < Manifest::kLeastChunk ||
      read.size > Manifest::kMostChunk || !std::has_single_bit(read.size))
    return false;
  out = {static_cast<uint32_t>(read.size), std::move(read.sha256)};
  return true;
}

}  // namespace

std::string_view KindName(LayerKind kind) {
  switch (kind) {
    case LayerKind::kBase:
      return "base";
    case LayerKind::kWorkspace:
      return "workspace";
    case LayerKind::kToolkit:
      return "toolkit";
  }
  return "?";
}

Result<LayerKind> ParseKind(std::string_view text) {
  for (const LayerKind kind : {LayerKind::kBase, LayerKind::kWorkspace, LayerKind::kToolkit}) {
    if (text == KindName(kind)) return kind;
  }
  return Error(Code::kInvalidArgument, "layer.bad_kind",
               fmt::format("\"{}\" is not one of base, workspace, toolkit", Printable(text)))
      .WithField("kind");
}

Result<LayerName> ParseLayerName(std::string_view text) {
  const size_t colon = text.rfind(':');
  LayerName parsed;
  parsed.name = std::string(text.substr(0, colon));
  parsed.tag = colon == std::string_view::npos ? "latest" : std::string(text.substr(colon + 1));
  const std::string& name = parsed.name;
  if (name.empty() || name.size() > kMaxNamePart) return BadName(text, "name is 1 to 128 long");
  if (!IsLowerAlnum(name.front()) || !IsLowerAlnum(name.back()) ||
      !std::ranges::all_of(name, [](char c) {
        return IsLowerAlnum(c) || c == '.' || c == '_' || c == '-' || c == '/';
      })) {
    return BadName(text, "name is of a-z 0-9 . _ - / and starts and ends with a letter or digit");
  }
  if (name == "sha256") return BadName(text, "sha256 is not a name");
  const std::string& tag = parsed.tag;
  if (tag.empty() || tag.size() > kMaxNamePart || (!IsAlnum(tag.front()) && tag.front() != '_') ||
      !std::ranges::all_of(tag,
                           [](char c) { return IsAlnum(c) || c == '.' || c == '_' || c == '-'; })) {
    return BadName(text, "tag is 1 to 128 of A-Z a-z 0-9 _ . - and does not start with . or -");
  }
  return parsed;
}

std::string Manifest::Encode() const {
  json content = FileToJson(blob);
  if (chunks.bytes != 0) content["chunks"] = {{"sha256", chunks.sha256}, {"size", chunks.bytes}};
  json object = {{"blob", std::move(content)},
                 {"format", format},
                 {"kind", KindName(kind)},
                 {"meta", FileToJson(meta)}};
  if (!config.empty()) object["config"] = ConfigToJson(config);
  for (const LayerId& id : lower) object["lower"].push_back(id.str());
  return Dump(object);
}

Result<Manifest> Manifest::Parse(std::string_view text) {
  const Error corrupt(Code::kInternal, "layer.corrupt",
                      fmt::format("not a layer manifest: {}", Printable(text)));
  const json object = json::parse(text, nullptr, false);
  if (!object.is_object()) return corrupt;
  const json format = object.value("format", json());
  if (!format.is_number_integer() || format < kOldestFormat || format > kWithLower) return corrupt;
  Manifest manifest;
  manifest.format = format.get<int>();
  std::string kind;
  if (!ReadString(object, "kind", kind) || !ReadFile(object, "meta", manifest.meta) ||
      !ReadFile(object, "blob", manifest.blob)) {
    return corrupt;
  }
  if (manifest.format >= kFirstWithChunks && !ReadChunks(object, manifest.chunks)) return corrupt;
  auto parsed = ParseKind(kind);
  if (!parsed.ok()) return corrupt;
  manifest.kind = *parsed;
  if (const auto found = object.find("config"); found != object.end()) {
    auto config = ConfigFromJson(*found);
    if (!config) return corrupt;
    manifest.config = *std::move(config);
  }
  std::vector<std::string> lower;
  if (object.contains("lower") && !ReadStrings(object, "lower", lower)) return corrupt;
  if (lower.empty() != (manifest.format < kWithLower) || lower.size() > kMaxLower) return corrupt;
  if (!lower.empty() && manifest.kind != LayerKind::kBase) return corrupt;
  for (const std::string& one : lower) {
    auto id = ParseLayerId(one);
    if (!id.ok() || std::ranges::find(manifest.lower, *id) != manifest.lower.end()) return corrupt;
    manifest.lower.push_back(*std::move(id));
  }
  if (manifest.Encode() != text) return corrupt;
  return manifest;
}

LayerId Manifest::Id() const { return LayerId("sha256:" + Sha256Hex(Encode())); }

std::string EncodeOrigin(const LayerInfo& layer) {
  return Dump(json{{"content_bytes", layer.content_bytes},
                   {"created_unix_ms", layer.created_unix_ms},
                   {"entries", layer.entries},
                   {"labels", layer.labels},
                   {"source", layer.source}});
}

Result<void> DecodeOrigin(std::string_view text, LayerInfo& layer) {
  const json object = json::parse(text, nullptr, false);
  const auto corrupt = [&] {
    return Error(Code::kInternal, "layer.corrupt",
                 fmt::format("not the origin of a layer: {}", Printable(text)));
  };
  LayerInfo read = layer;
  read.labels.clear();
  if (!object.is_object() || !ReadString(object, "source", read.source)) return corrupt();
  const json labels = object.value("labels", json());
  const json created = object.value("created_unix_ms", json());
  const json entries = object.value("entries", json());
  const json content = object.value("content_bytes", json());
  if (!labels.is_object() || !created.is_number_integer() || !entries.is_number_unsigned() ||
      !content.is_number_unsigned()) {
    return corrupt();
  }
  for (const auto& [key, value] : labels.items()) {
    if (!value.is_string()) return corrupt();
    read.labels[key] = value.get<std::string>();
  }
  read.created_unix_ms = created.get<int64_t>();
  read.entries = entries.get<uint64_t>();
  read.content_bytes = content.get<uint64_t>();
  layer = std::move(read);
  return Ok();
}

std::string EncodeConfig(const ImageConfig& config) { return Dump(ConfigToJson(config)); }

Result<ImageConfig> DecodeConfig(std::string_view text) {
  auto config = ConfigFromJson(json::parse(text, nullptr, false));
  if (!config) {
    return Error(Code::kInternal, "layer.corrupt",
                 fmt::format("not an image config: {}", Printable(text)));
  }
  return *std::move(config);
}

std::string Printable(std::string_view text) {
  constexpr size_t kShown = 200;
  std::string out;
  for (const char c : text.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f || c == '\\') {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  if (text.size() > kShown) out += fmt::format("... ({} bytes)", text.size());
  return out;
}

}  // namespace dsec::image
