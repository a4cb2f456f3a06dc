// SPDX-License-Identifier: Apache-2.0
#include "vmm/boot_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace dsec::vmm {
namespace {

constexpr std::string_view kHeader = "dsec-boot 1";
constexpr std::string_view kEnd = "end";
constexpr size_t kMaxHostname = 64;

Error Bad(std::string message) {
  return Error(Code::kInvalidArgument, "vm.boot_config", std::move(message));
}

std::string Hex(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) out += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return out;
}

int Nibble(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

// Takes the lines one by one, in the order of Encode.
class Lines {
 public:
  explicit Lines(std::string_view text) : rest_(text) {}
  Result<std::string_view> Line() {
    const size_t end = rest_.find('\n');
    if (end == std::string_view::npos) return Bad("it ends within a line");
    const std::string_view line = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
    return line;
  }
  Result<std::string_view> Text(std::string_view key) {
    DSEC_TRY(const std::string_view line, Line());
    if (!line.starts_with(key) || line.substr(key.size(), 1) != "=") {
      return Bad(fmt::format("{} is missing", key));
    }
    return line.substr(key.size() + 1);
  }
  template <typename T>
  Result<void> Number(std::string_view key, T& value) {
    DSEC_TRY(const std::string_view text, Text(key));
    const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (failure != std::errc() || end != text.data() + text.size()) {
      return Bad(fmt::format("{} is no number in range", key));
    }
    return Ok();
  }
  Result<void> Bytes(std::string_view key, std::string& value) {
    DSEC_TRY(const std::string_view text, Text(key));
    if (text.size() % 2 != 0) return Bad(fmt::format("{} has an odd number of digits", key));
    value.clear();
    for (size_t i = 0; i < text.size(); i += 2) {
      const int high = Nibble(text[i]), low = Nibble(text[i + 1]);
      if (high < 0 || low < 0) return Bad(fmt::format("{} is not hexadecimal", key));
      value += static_cast<char>(high << 4 | low);
    }
    return Ok();
  }
  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
};

}  // namespace

Result<void> BootConfig::Validate() const {
  if (port_secret.size() != kPortSecretBytes)
    return Bad(
        fmt::format("port_secret has {} bytes, not {}", port_secret.size(), kPortSecretBytes));
  if (token.size() != kTokenBytes)
    return Bad(fmt::format("token has {} bytes, not {}", token.size(), kTokenBytes));
  if (layers < 1 || layers > kMaxLayers)
    return Bad(fmt::format("layers is {}, not 1..{}", layers, kMaxLayers));
  if (hostname.empty() || hostname.size() > kMaxHostname ||
      !std::ranges::all_of(hostname, [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               c == '-' || c == '.';
      })) {
    return Bad("hostname has 1 to 64 letters, digits, dots and hyphens");
  }
  for (const auto& [name, value] :
       {std::pair("memory_bytes", memory_bytes), std::pair("cpu_millis", cpu_millis),
        std::pair("pids", pids), std::pair("shm_bytes", shm_bytes),
        std::pair("open_files", open_files)}) {
    if (value == 0) return Bad(fmt::format("{} is 0", name));
  }
  if (user_namespace != 1) return Bad("user_namespace is not 1");
  return Ok();
}

std::string BootConfig::Encode() const {
  std::string text = fmt::format(
      "{}\nport_secret={}\ntoken={}\nlayers={}\nhostname={}\nmemory_bytes={}\ncpu_millis={}\n"
      "pids={}\nshm_bytes={}\nopen_files={}\nuser_namespace={}\n{}\n",
      kHeader, Hex(port_secret), Hex(token), layers, hostname, memory_bytes, cpu_millis, pids,
      shm_bytes, open_files, user_namespace, kEnd);
  text.resize(kBootConfigBytes, '\0');
  return text;
}

Result<BootConfig> BootConfig::Parse(std::string_view bytes) {
  if (bytes.size() != kBootConfigBytes)
    return Bad(fmt::format("it has {} bytes, not {}", bytes.size(), kBootConfigBytes));
  BootConfig config;
  Lines lines(bytes);
  DSEC_TRY(const std::string_view header, lines.Line());
  if (header != kHeader) return Bad("it is of another version");
  DSEC_TRY_VOID(lines.Bytes("port_secret", config.port_secret));
  DSEC_TRY_VOID(lines.Bytes("token", config.token));
  DSEC_TRY_VOID(lines.Number("layers", config.layers));
  DSEC_TRY(config.hostname, lines.Text("hostname"));
  DSEC_TRY_VOID(lines.Number("memory_bytes", config.memory_bytes));
  DSEC_TRY_VOID(lines.Number("cpu_millis", config.cpu_millis));
  DSEC_TRY_VOID(lines.Number("pids", config.pids));
  DSEC_TRY_VOID(lines.Number("shm_bytes", config.shm_bytes));
  DSEC_TRY_VOID(lines.Number("open_files", config.open_files));
  DSEC_TRY_VOID(lines.Number("user_namespace", config.user_namespace));
  DSEC_TRY(const std::string_view end, lines.Line());
  if (end != kEnd) return Bad("it goes on where it should end");
  if (lines.rest().find_first_not_of('\0') != std::string_view::npos)
    return Bad("something follows its end");
  DSEC_TRY_VOID(config.Validate());
  if (config.Encode() != bytes) return Bad("a number is not written as Encode writes it");
  return config;
}

}  // namespace dsec::vmm
