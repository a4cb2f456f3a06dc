// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace dsec::blobfs {

struct HttpOptions {
  std::string url;           // http(s)://HOST[:PORT][/PATH], without a slash at the end
  std::string headers_file;  // "Name: value" a line, read anew for each request; empty: none
  std::string ca_file;       // PEM; empty: those of the system
  std::chrono::milliseconds connect_timeout = std::chrono::seconds(5);
  // A transfer that brings less than 1 KiB/s for this long is given up.
  std::chrono::seconds stall_timeout{10};
  // One request with all its repeats begins none after this long.
  std::chrono::milliseconds patience = std::chrono::seconds(20);
};

// Content-Range of a 206 (RFC 9110, 14.4): "bytes FIRST-LAST/TOTAL". nullopt: anything else, an
// unknown total included.
struct ContentRange {
  uint64_t first = 0;
  uint64_t last = 0;
  uint64_t total = 0;
};
std::optional<ContentRange> ParseContentRange(std::string_view value);

// Header lines for requests: the lines of a file, each "Name: value", without control bytes; empty
// lines are left out. kInvalidArgument "layer.source".
Result<std::vector<std::string>> ParseHeaders(std::string_view text);

// GETs below one URL, over connections that are kept. No redirect is followed, no encoding taken,
// no proxy or credential of the environment used. Errors of the network, 5xx, 408 and 429 are tried
// again with growing pauses. Thread-safe, blocking. What a server sends is hostile: no more than
// was asked for is taken.
//
// kNotFound "layer.not_found": 404 or 410. kUnavailable "layer.unreachable": all else, said in
// words.
class HttpClient {
 public:
  explicit HttpClient(HttpOptions options);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  // The whole of `path` (below the URL, with a slash at its start), of at most `limit` bytes.
  Result<std::string> Get(const std::string& path, size_t limit);
  // `out.size()` bytes from `offset` of a file of `total` bytes: 206 with just this Content-Range.
  Result<void> GetRange(const std::string& path, uint64_t offset, uint64_t total,
                        std::span<uint8_t> out);
  // Requests under way fail soon, later ones at once.
  void Stop();

 private:
  struct Transfer;
  struct Handle;
  Result<void> Run(const std::string& path, Transfer& transfer);
  Result<void> Once(const std::string& path, Transfer& transfer);
  std::unique_ptr<Handle> Take();
  void GiveBack(std::unique_ptr<Handle> handle);

  const HttpOptions options_;
  std::atomic<bool> stopped_ = false;
  std::mutex mutex_;
  std::condition_variable stop_;
  std::vector<std::unique_ptr<Handle>> idle_;  // with their connections
};

}  // namespace dsec::blobfs
