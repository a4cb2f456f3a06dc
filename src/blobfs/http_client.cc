// SPDX-License-Identifier: Apache-2.0
#include "blobfs/http_client.h"

#include <curl/curl.h>
#include <fcntl.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstring>

#include "base/check.h"
#include "base/clock.h"
#include "base/rng.h"
#include "image/root_calls.h"
#include "os/file.h"

namespace dsec::blobfs {
namespace {

using image::Unreachable;
using std::chrono::milliseconds;

constexpr size_t kMaxHeadersFile = 64 << 10;
constexpr long kLeastRate = 1024;  // bytes a second
constexpr milliseconds kFirstPause{100};
constexpr milliseconds kLongestPause{3000};

std::optional<uint64_t> Number(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string_view Trimmed(std::string_view text) {
  const auto blank = [](char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  return text;
}

bool Equal(std::string_view a, std::string_view b) {
  return std::ranges::equal(
      a, b, [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

bool WorthRepeating(long status) { return status >= 500 || status == 429 || status == 408; }

}  // namespace

std::optional<ContentRange> ParseContentRange(std::string_view value) {
  constexpr std::string_view kUnit = "bytes ";
  value = Trimmed(value);
  if (!Equal(value.substr(0, kUnit.size()), kUnit)) return std::nullopt;
  value.remove_prefix(kUnit.size());
  const size_t dash = value.find('-');
  const size_t slash = value.find('/');
  if (dash == value.npos || slash == value.npos || dash > slash) return std::nullopt;
  const auto first = Number(value.substr(0, dash));
  const auto last = Number(value.substr(dash + 1, slash - dash - 1));
  const auto total = Number(value.substr(slash + 1));
  if (!first || !last || !total || *first > *last || *last >= *total) return std::nullopt;
  return ContentRange{*first, *last, *total};
}

Result<std::vector<std::string>> ParseHeaders(std::string_view text) {
  std::vector<std::string> headers;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    const std::string_view line = Trimmed(text.substr(0, end));
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
    if (line.empty()) continue;
    const size_t colon = line.find(':');
    const bool clean =
        std::ranges::all_of(line, [](unsigned char c) { return c >= 0x20 && c < 0x7f; });
    if (!clean || colon == line.npos || colon == 0 ||
        line.substr(0, colon).find(' ') != line.npos) {
      return Error(
          Code::kInvalidArgument, "layer.source",
          fmt::format("line {} of the headers is not \"Name: value\"", headers.size() + 1));
    }
    headers.emplace_back(line);
  }
  return headers;
}

struct HttpClient::Handle {
  CURL* curl = ::curl_easy_init();
  char error[CURL_ERROR_SIZE] = {};
  Handle() { DSEC_CHECK(curl != nullptr); }
  ~Handle() { ::curl_easy_cleanup(curl); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
};

// One request: what is wanted and what has come.
struct HttpClient::Transfer {
  // Of a range:
  std::span<uint8_t> out;
  uint64_t offset = 0;
  uint64_t total = 0;
  // Of a whole:
  std::string* text = nullptr;
  size_t limit = 0;

  CURL* curl = nullptr;
  const std::atomic<bool>* stopped = nullptr;
  size_t got = 0;
  std::optional<ContentRange> range;
  std::string refused;  // why the body is not taken

  void Begin(CURL* handle) {
    curl = handle;
    got = 0;
    range.reset();
    refused.clear();
    if (text != nullptr) text->clear();
  }
  long Status() const {
    long status = 0;
    ::curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    return status;
  }
  // Before the first byte of the body: whether it is what was asked for.
  bool Fits() {
    const long status = Status();
    if (text != nullptr) {
      if (status != 200) refused = fmt::format("status {}", status);
    } else if (status == 200) {
      refused = "it answers 200 with the whole file where a range was asked for";
    } else if (status != 206) {
      refused = fmt::format("status {}", status);
    } else if (!range || range->first != offset || range->total != total ||
               range->last != offset + out.size() - 1) {
      refused = "its Content-Range is another one";
    }
    return refused.empty();
  }
  bool Take(std::span<const uint8_t> bytes) {
    if (!refused.empty() || (got == 0 && !Fits())) return false;
    if (bytes.size() > (text != nullptr ? limit : out.size()) - got) {
      refused = "it sends more than was asked for";
      return false;
    }
    if (text != nullptr) {
      text->append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    } else {
      std::memcpy(out.data() + got, bytes.data(), bytes.size());
    }
    got += bytes.size();
    return true;
  }
  void Header(std::string_view line) {
    if (line.starts_with("HTTP/")) range.reset();  // another answer begins (100 Continue)
    const size_t colon = line.find(':');
    if (colon == line.npos) return;
    const std::string_view name = line.substr(0, colon);
    const std::string_view value = Trimmed(line.substr(colon + 1));
    if (Equal(name, "content-range")) range = ParseContentRange(value);
    if (Equal(name, "content-encoding") && !Equal(value, "identity"))
      refused = "it encodes the content";
  }

  static size_t OnBody(char* data, size_t size, size_t count, void* self) {
    const bool taken =
        static_cast<Transfer*>(self)->Take({reinterpret_cast<const uint8_t*>(data), size * count});
    return taken ? size * count : 0;
  }
  static size_t OnHeader(char* data, size_t size, size_t count, void* self) {
    static_cast<Transfer*>(self)->Header({data, size * count});
    return size * count;
  }
  static int OnProgress(void* self, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
    return *static_cast<Transfer*>(self)->stopped ? 1 : 0;
  }
};

HttpClient::HttpClient(HttpOptions options) : options_(std::move(options)) {
  static const CURLcode kMade = ::curl_global_init(CURL_GLOBAL_DEFAULT);
  DSEC_CHECK(kMade == CURLE_OK);
}

HttpClient::~HttpClient() = default;

void HttpClient::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  stop_.notify_all();
}

std::unique_ptr<HttpClient::Handle> HttpClient::Take() {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) return std::make_unique<Handle>();
  auto handle = std::move(idle_.back());
  idle_.pop_back();
  return handle;
}

void HttpClient::GiveBack(std::unique_ptr<Handle> handle) {
  ::curl_easy_reset(handle->curl);  // keeps the connection
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(handle));
}

Result<std::string> HttpClient::Get(const std::string& path, size_t limit) {
  std::string text;
  Transfer transfer;
  transfer.text = &text;
  transfer.limit = limit;
  DSEC_TRY_VOID(Run(path, transfer));
  return text;
}

Result<void> HttpClient::GetRange(const std::string& path, uint64_t offset, uint64_t total,
                                  std::span<uint8_t> out) {
  Transfer transfer;
  transfer.out = out;
  transfer.offset = offset;
  transfer.total = total;
  return Run(path, transfer);
}

// Repeats what may work the next time; an error without errno will not.
Result<void> HttpClient::Run(const std::string& path, Transfer& transfer) {
  const MonoTime begun = Clock::System().Mono();
  milliseconds pause = kFirstPause;
  transfer.stopped = &stopped_;
  Rng rng = Rng::FromSystem();
  while (true) {
    auto done = Once(path, transfer);
    if (done.ok() || done.error().sys_errno() != EAGAIN || stopped_) return done;
    if (Clock::System().Mono() - begun + pause > options_.patience) return done;
    // From half to the whole, lest all come back at once.
    const auto wait =
        pause / 2 + milliseconds(rng.Below(static_cast<uint64_t>(pause.count() / 2 + 1)));
    std::unique_lock lock(mutex_);
    stop_.wait_for(lock, wait, [&] { return stopped_.load(); });
    pause = std::min(pause * 2, kLongestPause);
  }
}

Result<void> HttpClient::Once(const std::string& path, Transfer& transfer) {
  std::vector<std::string> headers;
  if (!options_.headers_file.empty()) {
    auto text = os::ReadFile(AT_FDCWD, options_.headers_file.c_str(), kMaxHeadersFile);
    if (!text.ok()) return Unreachable(options_.headers_file + ": " + text.error().message());
    DSEC_TRY(headers, ParseHeaders(*text));
  }
  auto handle = Take();
  CURL* curl = handle->curl;
  transfer.Begin(curl);
  const std::string url = options_.url + path;
  curl_slist* list = nullptr;
  for (const std::string& line : headers) list = ::curl_slist_append(list, line.c_str());
  const auto set = [curl](CURLoption option, auto value) {
    DSEC_CHECK(::curl_easy_setopt(curl, option, value) == CURLE_OK);
  };
  set(CURLOPT_ERRORBUFFER, handle->error);
  set(CURLOPT_URL, url.c_str());
  set(CURLOPT_PROTOCOLS_STR, "http,https");
  set(CURLOPT_FOLLOWLOCATION, 0L);
  set(CURLOPT_NETRC, static_cast<long>(CURL_NETRC_IGNORED));
  set(CURLOPT_PROXY, "");
  set(CURLOPT_NOSIGNAL, 1L);
  set(CURLOPT_SSL_VERIFYPEER, 1L);
  set(CURLOPT_SSL_VERIFYHOST, 2L);
  if (!options_.ca_file.empty()) set(CURLOPT_CAINFO, options_.ca_file.c_str());
  if (list != nullptr) set(CURLOPT_HTTPHEADER, list);
  set(CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(options_.connect_timeout.count()));
  set(CURLOPT_LOW_SPEED_LIMIT, kLeastRate);
  set(CURLOPT_LOW_SPEED_TIME, static_cast<long>(options_.stall_timeout.count()));
  set(CURLOPT_TCP_KEEPALIVE, 1L);
  set(CURLOPT_WRITEFUNCTION, Transfer::OnBody);
  set(CURLOPT_WRITEDATA, static_cast<void*>(&transfer));
  set(CURLOPT_HEADERFUNCTION, Transfer::OnHeader);
  set(CURLOPT_HEADERDATA, static_cast<void*>(&transfer));
  set(CURLOPT_NOPROGRESS, 0L);
  set(CURLOPT_XFERINFOFUNCTION, Transfer::OnProgress);
  set(CURLOPT_XFERINFODATA, static_cast<void*>(&transfer));
  std::string range;
  if (transfer.text == nullptr) {
    range = fmt::format("{}-{}", transfer.offset, transfer.offset + transfer.out.size() - 1);
    set(CURLOPT_RANGE, range.c_str());
  }
  const CURLcode code = ::curl_easy_perform(curl);
  ::curl_slist_free_all(list);
  if (code == CURLE_OK && transfer.got == 0 && transfer.refused.empty())
    static_cast<void>(transfer.Fits());
  const long status = transfer.Status();
  const std::string why = handle->error[0] != '\0' ? handle->error : ::curl_easy_strerror(code);
  handle->error[0] = '\0';
  GiveBack(std::move(handle));

  if (status == 404 || status == 410)
    return Error(Code::kNotFound, "layer.not_found", fmt::format("{}: status {}", url, status));
  if (WorthRepeating(status))
    return Unreachable(fmt::format("{}: status {}", url, status)).WithErrno(EAGAIN);
  if (!transfer.refused.empty()) return Unreachable(url + ": " + transfer.refused);
  if (code != CURLE_OK) return Unreachable(url + ": " + why).WithErrno(EAGAIN);
  if (transfer.text == nullptr && transfer.got != transfer.out.size()) {
    return Unreachable(fmt::format("{}: {} of {} bytes", url, transfer.got, transfer.out.size()))
        .WithErrno(EAGAIN);
  }
  return Ok();
}

}  // namespace dsec::blobfs
