// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "apiserver/call.h"
#include "http/json_writer.h"

namespace dsec::apiserver {

// One page of something that is listed in order of a name: reads page_size (1..1000, 100) and
// page_token (the last name of the page before) from the query.
class IamPage {
 public:
  explicit IamPage(Call& call)
      : left_(call.query.Number("page_size", 100, 1, 1000)),
        after_(call.query.Text("page_token")) {}

  void Begin(std::string& body, std::string_view key) {
    body_ = &body;
    json_.emplace(body);
    json_->BeginObject();
    json_->BeginArray(key);
  }
  // False when the page is full: this one is not in it.
  template <typename F>
  bool Add(std::string_view name, const F& write) {
    if (name <= after_) return true;
    if (left_ == 0) {
      next_ = last_;
      return false;
    }
    --left_;
    last_ = name;
    write(*json_);
    return true;
  }
  std::string Finish() {
    json_->EndArray();
    json_->Field("next_page_token", next_);
    json_->EndObject();
    return std::move(*body_);
  }

 private:
  uint64_t left_;
  const std::string after_;
  std::string last_, next_;
  std::string* body_ = nullptr;
  std::optional<http::JsonWriter> json_;
};

}  // namespace dsec::apiserver
