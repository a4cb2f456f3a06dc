// SPDX-License-Identifier: Apache-2.0
#include "http/parser.h"

#include <algorithm>
#include <boost/beast/http/basic_parser.hpp>
#include <limits>
#include <optional>
#include <type_traits>

#include "base/check.h"
#include "http/chunked.h"

namespace dsec::http {
namespace {

namespace beast = boost::beast;

Error Malformed(std::string message) {
  return Error(Code::kInvalidArgument, "request.malformed", std::move(message));
}

// All of `text` as a decimal number of at most 18 digits.
std::optional<uint64_t> ParseLength(std::string_view text) {
  if (text.empty() || text.size() > 18) return std::nullopt;
  uint64_t value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    value = value * 10 + static_cast<uint64_t>(c - '0');
  }
  return value;
}

Error FromBeast(const beast::error_code& error) {
  using beast::http::error;
  if (error == error::header_limit) {
    return Error(Code::kInvalidArgument, "request.head_too_large",
                 "the head of the message is too large");
  }
  if (error == error::bad_version) {
    return Error(Code::kInvalidArgument, "request.version",
                 "only HTTP/1.0 and HTTP/1.1 are spoken");
  }
  return Malformed("malformed HTTP message: " + error.message());
}

std::string_view View(beast::string_view text) { return {text.data(), text.size()}; }

template <typename HeadType>
constexpr bool kIsRequest = std::is_same_v<HeadType, RequestHead>;

// Beast parses the heads; bodies are none of its business here.
template <typename HeadType>
class Core final : public beast::http::basic_parser<kIsRequest<HeadType>> {
 public:
  Core(HeadType& head, size_t max_head_bytes) : head_(head) {
    this->header_limit(static_cast<uint32_t>(max_head_bytes));
    this->body_limit(boost::none);
  }

  bool http11 = false;

 private:
  void on_request_impl(beast::http::verb, beast::string_view method, beast::string_view target,
                       int version, beast::error_code&) override {
    http11 = version >= 11;
    if constexpr (kIsRequest<HeadType>) {
      head_.method.assign(method.data(), method.size());
      head_.target.assign(target.data(), target.size());
    }
  }
  void on_response_impl(int status, beast::string_view, int version, beast::error_code&) override {
    http11 = version >= 11;
    if constexpr (!kIsRequest<HeadType>) head_.status = status;
  }
  void on_field_impl(beast::http::field, beast::string_view name, beast::string_view value,
                     beast::error_code&) override {
    head_.fields.Add(View(name), View(value));
  }
  void on_header_impl(beast::error_code&) override {}
  void on_body_init_impl(const boost::optional<uint64_t>&, beast::error_code&) override {}
  size_t on_body_impl(beast::string_view, beast::error_code&) override { return 0; }
  void on_chunk_header_impl(uint64_t, beast::string_view, beast::error_code&) override {}
  size_t on_chunk_body_impl(uint64_t, beast::string_view, beast::error_code&) override { return 0; }
  void on_finish_impl(beast::error_code&) override {}

  HeadType& head_;
};

Result<void> CheckFraming(const Fields& fields, bool http11, Framing& framing) {
  const size_t codings = fields.Count("Transfer-Encoding");
  const size_t lengths = fields.Count("Content-Length");
  if (codings != 0 && lengths != 0) return Malformed("Content-Length beside Transfer-Encoding");
  if (codings != 0) {
    if (!http11) return Malformed("Transfer-Encoding in HTTP/1.0");
    if (codings > 1 || !EqualsIgnoreCase(*fields.Find("Transfer-Encoding"), "chunked")) {
      return Error(Code::kInvalidArgument, "request.transfer_coding",
                   "the only transfer coding is chunked")
          .WithField("Transfer-Encoding");
    }
    framing.chunked = true;
  } else if (lengths != 0) {
    framing.length = ParseLength(*fields.Find("Content-Length"));
    if (lengths > 1 || !framing.length) {
      return Malformed("Content-Length must be given once, as a number")
          .WithField("Content-Length");
    }
  }
  return Ok();
}

Result<void> Finish(RequestHead& head, bool http11, bool keep_alive) {
  head.http11 = http11;
  head.keep_alive = keep_alive;
  DSEC_TRY_VOID(CheckFraming(head.fields, http11, head.framing));
  if (!head.framing.chunked && !head.framing.length) head.framing.length = 0;
  const size_t hosts = head.fields.Count("Host");
  if (hosts > 1 || (http11 && hosts == 0))
    return Malformed("Host must be given once").WithField("Host");
  if (const auto expect = head.fields.Find("Expect"); expect && http11) {
    if (head.fields.Count("Expect") != 1 || !EqualsIgnoreCase(*expect, "100-continue")) {
      return Error(Code::kInvalidArgument, "request.expectation",
                   "the only expectation is 100-continue")
          .WithField("Expect");
    }
    head.expect_continue = true;
  }
  return Ok();
}

Result<void> Finish(ResponseHead& head, bool http11, bool keep_alive) {
  head.keep_alive = keep_alive;
  const bool bodiless = head.status / 100 == 1 || head.status == 204 || head.status == 304;
  DSEC_TRY_VOID(CheckFraming(head.fields, http11, head.framing));
  if (bodiless) head.framing = Framing{.length = 0};
  if (!head.framing.chunked && !head.framing.length) {
    head.framing.until_close = true;
    head.keep_alive = false;
  }
  return Ok();
}

}  // namespace

template <typename HeadType>
struct Parser<HeadType>::Impl {
  explicit Impl(size_t max) : max_head(max) {}
  const size_t max_head;
  HeadType head;
  std::optional<Core<HeadType>> core;
  std::optional<ChunkDecoder> chunks;
  size_t head_bytes = 0;
  bool head_done = false;
  uint64_t left = 0;  // of a body with a length
  bool closed = false;
};

template <typename HeadType>
Parser<HeadType>::Parser(size_t max_head_bytes) : impl_(std::make_unique<Impl>(max_head_bytes)) {
  Reset();
}

template <typename HeadType>
Parser<HeadType>::~Parser() = default;

template <typename HeadType>
void Parser<HeadType>::Reset() {
  Impl& p = *impl_;
  p.head.fields.Clear();
  p.head.framing = {};
  if constexpr (kIsRequest<HeadType>) p.head.expect_continue = false;
  p.core.emplace(p.head, p.max_head);
  p.chunks.reset();
  p.head_bytes = 0;
  p.head_done = false;
  p.left = 0;
  p.closed = false;
}

template <typename HeadType>
Result<size_t> Parser<HeadType>::Head(std::string_view data) {
  Impl& p = *impl_;
  DSEC_CHECK(!p.head_done);
  size_t used = 0;
  // RFC 9112 section 2.2: empty lines before a request-line are ignored.
  if constexpr (kIsRequest<HeadType>) {
    while (p.head_bytes == 0 && data.substr(used).starts_with("\r\n")) used += 2;
  }
  while (used < data.size()) {
    // A lone CR may be the first half of such an empty line.
    if (p.head_bytes == 0 && data.substr(used) == "\r") break;
    beast::error_code error;
    const size_t count = p.core->put({data.data() + used, data.size() - used}, error);
    used += count;
    p.head_bytes += count;
    const size_t waiting = p.core->is_header_done() ? 0 : data.size() - used;
    if (p.head_bytes + waiting > p.max_head) {
      return Error(Code::kInvalidArgument, "request.head_too_large",
                   fmt::format("the head of the message is above {} bytes", p.max_head));
    }
    if (error == beast::http::error::need_more) break;
    if (error) return FromBeast(error);
    if (!p.core->is_header_done()) continue;
    p.head_done = true;
    DSEC_TRY_VOID(Finish(p.head, p.core->http11, p.core->keep_alive()));
    p.left = p.head.framing.length.value_or(0);
    if (p.head.framing.chunked) p.chunks.emplace(p.max_head);
    break;
  }
  return used;
}

template <typename HeadType>
bool Parser<HeadType>::head_started() const {
  return impl_->head_bytes > 0;
}

template <typename HeadType>
bool Parser<HeadType>::head_done() const {
  return impl_->head_done;
}

template <typename HeadType>
const HeadType& Parser<HeadType>::head() const {
  return impl_->head;
}

template <typename HeadType>
Result<size_t> Parser<HeadType>::Body(std::string_view data, size_t max, std::string& out) {
  Impl& p = *impl_;
  DSEC_CHECK(p.head_done);
  if (!p.head.framing.chunked) {
    uint64_t count = std::min(data.size(), max);
    if (!p.head.framing.until_close) count = std::min(count, p.left);
    out.append(data.substr(0, count));
    Skip(count);
    return static_cast<size_t>(count);
  }
  return p.chunks->Decode(data, max, out);
}

template <typename HeadType>
bool Parser<HeadType>::body_done() const {
  const Impl& p = *impl_;
  if (!p.head_done) return false;
  if (p.head.framing.chunked) return p.chunks->done();
  return p.head.framing.until_close ? p.closed : p.left == 0;
}

template <typename HeadType>
uint64_t Parser<HeadType>::plain_left() const {
  const Impl& p = *impl_;
  if (!p.head_done || p.head.framing.chunked) return 0;
  return p.head.framing.until_close ? std::numeric_limits<uint64_t>::max() : p.left;
}

template <typename HeadType>
void Parser<HeadType>::Skip(uint64_t bytes) {
  if (impl_->head.framing.until_close) return;
  DSEC_CHECK(bytes <= impl_->left);
  impl_->left -= bytes;
}

template <typename HeadType>
Result<void> Parser<HeadType>::End() {
  if (impl_->head_done && impl_->head.framing.until_close) impl_->closed = true;
  if (body_done()) return Ok();
  return Malformed("the connection was closed in the middle of a message");
}

template class Parser<RequestHead>;
template class Parser<ResponseHead>;

}  // namespace dsec::http
