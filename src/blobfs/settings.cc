// SPDX-License-Identifier: Apache-2.0
#include "blobfs/settings.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "os/file.h"
#include "os/process.h"

namespace dsec::blobfs {

using nlohmann::json;

std::string Settings::Encode() const {
  return json{{"ca_file", ca_file},
              {"cache_bytes", cache_bytes},
              {"cache_dir", cache_dir},
              {"dir", dir},
              {"headers_file", headers_file},
              {"log_json", log.format == log::Format::kJson},
              {"log_level", static_cast<int>(log.level)},
              {"root", root},
              {"url", url}}
      .dump(-1, ' ', false, json::error_handler_t::replace);
}

Result<Settings> Settings::Parse(std::string_view text) {
  const json object = json::parse(text, nullptr, false);
  const Error bad(Code::kInvalidArgument, "layer.source", "not the settings of dsec-blobfs");
  if (!object.is_object()) return bad;
  Settings settings;
  for (const auto& [key, member] :
       {std::pair("ca_file", &settings.ca_file), std::pair("cache_dir", &settings.cache_dir),
        std::pair("dir", &settings.dir), std::pair("headers_file", &settings.headers_file),
        std::pair("root", &settings.root), std::pair("url", &settings.url)}) {
    const auto found = object.find(key);
    if (found == object.end() || !found->is_string()) return bad;
    *member = found->get<std::string>();
  }
  const json bytes = object.value("cache_bytes", json());
  const json level = object.value("log_level", json());
  const json in_json = object.value("log_json", json());
  if (!bytes.is_number_unsigned() || !level.is_number_integer() || !in_json.is_boolean())
    return bad;
  settings.cache_bytes = bytes.get<uint64_t>();
  settings.log.level = static_cast<log::Level>(std::clamp(level.get<int>(), 0, 3));
  settings.log.format = in_json.get<bool>() ? log::Format::kJson : log::Format::kText;
  return settings;
}

Result<void> WritePidFile(const std::string& dir, const char* name) {
  DSEC_TRY(const auto self, os::ReadProcStat(::getpid()));
  const std::string path = dir + "/" + name;
  const std::string fresh = path + ".new";
  static_cast<void>(::unlink(fresh.c_str()));
  DSEC_TRY_VOID(os::CreateFile(AT_FDCWD, fresh.c_str(),
                               fmt::format("{} {}\n", self.pid, self.start_time), 0600));
  if (::rename(fresh.c_str(), path.c_str()) != 0) return os::ErrnoError("layer.io", path);
  return Ok();
}

Error ErrorOf(std::string_view reason, std::string message) {
  constexpr std::pair<std::string_view, Code> kKnown[] = {
      {"layer.not_found", Code::kNotFound},
      {"layer.corrupt", Code::kInternal},
      {"layer.unverifiable", Code::kFailedPrecondition},
      {"layer.unreachable", Code::kUnavailable},
      {"layer.no_space", Code::kResourceExhausted},
      {"layer.source", Code::kInvalidArgument}};
  for (const auto& [known, code] : kKnown) {
    if (reason == known) return Error(code, known, std::move(message));
  }
  return Error(Code::kInternal, "layer.io", std::move(message));
}

}  // namespace dsec::blobfs
