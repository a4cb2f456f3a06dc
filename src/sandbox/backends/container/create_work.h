// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "runtime/deadline.h"
#include "runtime/task.h"

namespace dsec::sandbox {

// The creates and packs under way, by sandbox id. One that ran into its deadline may still have a
// thread at work on the host; a Destroy of the same sandbox must neither race with it nor miss what
// it makes. Thread-safe.
class CreateWorks {
 public:
  // Held by the coroutine of a create and by each of its jobs: the create is over when the last is
  // gone.
  class Token {
   public:
    virtual ~Token() = default;
    // kCancelled "create.destroyed" once a Destroy has come: asked before each step.
    virtual Result<void> Check() const = 0;
  };

  CreateWorks();
  ~CreateWorks();
  // kConflict when one of that id is under way.
  Result<std::shared_ptr<Token>> Begin(const std::string& id);
  // Tells a create of that id, if there is one, to stop, and waits until it is over.
  // kDeadlineExceeded "sandbox.stuck".
  runtime::Task<void> End(std::string id, runtime::Deadline deadline);

 private:
  struct State;
  class TokenOf;
  const std::shared_ptr<State> state_;
};

}  // namespace dsec::sandbox
