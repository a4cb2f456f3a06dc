// SPDX-License-Identifier: Apache-2.0
#include "up/control.h"

#include <utility>

#include "base/log.h"

namespace dsec::up {

Result<std::unique_ptr<Control>> Control::Open(const config::NodeConfig& config,
                                               const std::string& api_key,
                                               runtime::Shards& shards) {
  std::unique_ptr<Control> made(new Control());
  auto opened = made->OpenParts(config, api_key, shards.at(0));
  if (!opened.ok()) {
    made->Close(shards);
    return std::move(opened).error();
  }
  return made;
}

Result<void> Control::OpenParts(const config::NodeConfig& config, const std::string& api_key,
                                const runtime::Executor& home) {
  DSEC_TRY(store_,
           store::SqliteStore::Open(config.state_dir + "/control.db", home, Clock::System()));
  iam::AuditOptions audit;
  audit.keep = config.audit_records;
  DSEC_TRY(audit_, iam::AuditLog::Open(config.state_dir + "/audit.db", home, audit));
  iam::DirectoryOptions options;
  options.root_key = iam::DigestOf(api_key);
  options.cache_max = std::chrono::milliseconds(config.iam_cache_max_ms);
  DSEC_TRY(directory_, runtime::BlockOn(home, iam::Directory::Open(*store_, home, options)));
  iam::Directory* const directory = directory_.get();
  iam::QuotaOptions quota;
  quota.node_id = config.node_id;
  quota.limits = [directory](const iam::ProjectPath& project) -> std::optional<iam::Limits> {
    return directory->Now()->LimitsOf(project);
  };
  quota.freed = [told = told_] {
    if (edge::Edge* const edge = told->load()) edge->QuotaFreed();
  };
  quota_ = std::make_unique<iam::QuotaKeeper>(*store_, home, std::move(quota));
  directory->OnChange([keeper = quota_.get()] { keeper->LimitsChanged(); });
  return Ok();
}

Control::~Control() {
  told_->store(nullptr);
  quota_.reset();
  directory_.reset();
  audit_.reset();
  store_.reset();
}

void Control::Settle(runtime::Shards& shards) {
  auto restored = runtime::BlockOn(shards.at(0), quota_->Restore());
  // It is tried again each second.
  if (!restored.ok()) log::Warn("node.quota_not_restored", {{"error", restored.error()}});
}

void Control::Close(runtime::Shards& shards) {
  if (!stopped_) (void)runtime::BlockOn(shards.at(0), Stop());
}

runtime::Task<void> Control::Stop() {
  stopped_ = true;
  if (directory_) (void)co_await directory_->Stop();
  if (quota_) (void)co_await quota_->Stop();
  if (audit_) (void)co_await audit_->Stop();
  co_return Ok();
}

}  // namespace dsec::up
