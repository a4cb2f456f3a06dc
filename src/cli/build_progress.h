// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "image/content_order.h"
#include "image/layer.h"

namespace dsec::cli {

// The first Ctrl-C or SIGTERM from here on ends the work on a layer in order, a second one at once.
void CatchInterrupts();
bool Interrupted();

// One line that is written over and over; nothing when stderr is no terminal.
class ProgressLine {
 public:
  explicit ProgressLine(bool wanted);
  ~ProgressLine() { Clear(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void Show(const image::Progress& progress);
  void Clear();

 private:
  bool shown_;
  bool dirty_ = false;
};

// What --first-touch names; nothing for an empty path.
Result<std::vector<image::FirstTouch>> ReadFirstTouch(const std::string& path);

}  // namespace dsec::cli
