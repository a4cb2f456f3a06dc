// SPDX-License-Identifier: Apache-2.0
#include "image/oci_json.h"

#include <nlohmann/json.hpp>
#include <set>

#include "image/digest.h"

namespace dsec::image {
namespace {

using nlohmann::json;

constexpr size_t kMaxList = 1000;  // layers, manifests, environment variables
constexpr std::string_view kRefAnnotation = "org.opencontainers.image.ref.name";
#if defined(__aarch64__)
constexpr std::string_view kArchitecture = "arm64";
#else
constexpr std::string_view kArchitecture = "amd64";
#endif

Error Malformed(std::string_view document, std::string_view field, std::string_view rule) {
  return Error(Code::kInvalidArgument, "layer.malformed",
               fmt::format("{}: {} {}", document, field, rule))
      .WithField(std::string(field));
}

// One object of a document with the place it was found at, for messages.
class Node {
 public:
  Node(const json& value, std::string_view document, std::string path)
      : value_(value), document_(document), path_(std::move(path)) {}

  Error Fail(std::string_view key, std::string_view rule) const {
    return Malformed(document_, key.empty() ? path_ : path_ + "." + std::string(key), rule);
  }

  // Absent and null are the empty string.
  Result<std::string> Text(std::string_view key) const {
    const json* found = Find(key);
    if (found == nullptr) return std::string();
    if (!found->is_string()) return Fail(key, "must be a string");
    auto text = found->get<std::string>();
    if (text.find('\0') != std::string::npos) return Fail(key, "must not hold a NUL");
    return text;
  }

  Result<std::vector<std::string>> Texts(std::string_view key) const {
    std::vector<std::string> list;
    const json* found = Find(key);
    if (found == nullptr) return list;
    if (!found->is_array() || found->size() > kMaxList) return Fail(key, "must be a short list");
    for (const json& item : *found) {
      if (!item.is_string()) return Fail(key, "must hold strings");
      list.push_back(item.get<std::string>());
      if (list.back().find('\0') != std::string::npos) return Fail(key, "must not hold a NUL");
    }
    return list;
  }

  Result<uint64_t> Number(std::string_view key) const {
    const json* found = Find(key);
    if (found == nullptr || !found->is_number_unsigned()) return Fail(key, "must be a number");
    return found->get<uint64_t>();
  }

  // An absent object is an empty one.
  Result<Node> Object(std::string_view key) const {
    static const json kEmpty = json::object();
    const json* found = Find(key);
    if (found == nullptr) return Node(kEmpty, document_, path_ + "." + std::string(key));
    if (!found->is_object()) return Fail(key, "must be an object");
    return Node(*found, document_, path_ + "." + std::string(key));
  }

  Result<std::vector<Node>> Objects(std::string_view key) const {
    const json* found = Find(key);
    if (found == nullptr || !found->is_array()) return Fail(key, "must be a list");
    return Items(*found, document_, path_ + "." + std::string(key));
  }

  static Result<std::vector<Node>> Items(const json& list, std::string_view document,
                                         const std::string& path) {
    if (list.size() > kMaxList) return Malformed(document, path, "is too long");
    std::vector<Node> nodes;
    for (const json& item : list) {
      nodes.emplace_back(item, document, fmt::format("{}[{}]", path, nodes.size()));
      if (!item.is_object()) return nodes.back().Fail("", "must be an object");
    }
    return nodes;
  }

 private:
  const json* Find(std::string_view key) const {
    const auto found = value_.find(key);
    return found == value_.end() || found->is_null() ? nullptr : &*found;
  }

  const json& value_;
  std::string_view document_;
  std::string path_;
};

Result<json> ParseJson(std::string_view text, std::string_view document) {
  if (text.size() > kMaxDocument) return Malformed(document, "$", "is too long");
  json parsed = json::parse(text, nullptr, false);
  if (parsed.is_discarded()) return Malformed(document, "$", "is not JSON");
  return parsed;
}

Result<json> ParseObject(std::string_view text, std::string_view document) {
  DSEC_TRY(json parsed, ParseJson(text, document));
  if (!parsed.is_object()) return Malformed(document, "$", "must be an object");
  return parsed;
}

Result<std::string> DigestHex(const Node& node, std::string_view key, const std::string& digest) {
  constexpr std::string_view kPrefix = "sha256:";
  if (!digest.starts_with(kPrefix) ||
      !IsSha256Hex(std::string_view(digest).substr(kPrefix.size()))) {
    return node.Fail(key, "must be sha256: and 64 hex digits");
  }
  return digest.substr(kPrefix.size());
}

Result<Descriptor> ParseDescriptor(const Node& node) {
  Descriptor descriptor;
  DSEC_TRY(descriptor.media_type, node.Text("mediaType"));
  DSEC_TRY(const std::string digest, node.Text("digest"));
  DSEC_TRY(descriptor.sha256, DigestHex(node, "digest", digest));
  DSEC_TRY(descriptor.size, node.Number("size"));
  DSEC_TRY(const Node annotations, node.Object("annotations"));
  DSEC_TRY(descriptor.ref_name, annotations.Text(kRefAnnotation));
  DSEC_TRY(const Node platform, node.Object("platform"));
  DSEC_TRY(descriptor.architecture, platform.Text("architecture"));
  DSEC_TRY(descriptor.os, platform.Text("os"));
  return descriptor;
}

bool PlatformFits(const Descriptor& descriptor) {
  return (descriptor.architecture.empty() || descriptor.architecture == kArchitecture) &&
         (descriptor.os.empty() || descriptor.os == "linux");
}

}  // namespace

bool IsIndex(const Descriptor& descriptor) {
  return descriptor.media_type == "application/vnd.oci.image.index.v1+json" ||
         descriptor.media_type == "application/vnd.docker.distribution.manifest.list.v2+json";
}

Result<std::vector<Descriptor>> ParseIndex(std::string_view text) {
  DSEC_TRY(const json parsed, ParseObject(text, "image index"));
  const Node root(parsed, "image index", "$");
  DSEC_TRY(const auto nodes, root.Objects("manifests"));
  std::vector<Descriptor> list;
  for (const Node& node : nodes) {
    DSEC_TRY(Descriptor descriptor, ParseDescriptor(node));
    list.push_back(std::move(descriptor));
  }
  return list;
}

Result<Descriptor> Choose(const std::vector<Descriptor>& list, std::string_view ref) {
  std::vector<Descriptor> fitting;
  std::string choices;
  for (const Descriptor& descriptor : list) {
    if (choices.size() < 500) {
      choices += fmt::format(" {}({}/{})", Printable(descriptor.ref_name), Printable(descriptor.os),
                             Printable(descriptor.architecture));
    }
    if ((ref.empty() || descriptor.ref_name == ref) && PlatformFits(descriptor)) {
      fitting.push_back(descriptor);
    }
  }
  if (fitting.size() == 1) return fitting.front();
  const bool none = fitting.empty();
  return Error(Code::kInvalidArgument, none ? "layer.ref_not_found" : "layer.ambiguous_ref",
               fmt::format("{} image for ref \"{}\" on linux/{}; the index has:{}",
                           none ? "no" : "more than one", Printable(ref), kArchitecture, choices))
      .WithField("ref");
}

Result<ImageManifest> ParseImageManifest(std::string_view text) {
  DSEC_TRY(const json parsed, ParseObject(text, "image manifest"));
  const Node root(parsed, "image manifest", "$");
  ImageManifest manifest;
  DSEC_TRY(const Node config, root.Object("config"));
  DSEC_TRY(manifest.config, ParseDescriptor(config));
  DSEC_TRY(const auto nodes, root.Objects("layers"));
  static const std::set<std::string_view> kLayerTypes = {
      "application/vnd.oci.image.layer.v1.tar",
      "application/vnd.oci.image.layer.v1.tar+gzip",
      "application/vnd.oci.image.layer.v1.tar+zstd",
      "application/vnd.oci.image.layer.nondistributable.v1.tar",
      "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
      "application/vnd.docker.image.rootfs.diff.tar",
      "application/vnd.docker.image.rootfs.diff.tar.gzip",
      "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"};
  for (const Node& node : nodes) {
    DSEC_TRY(Descriptor layer, ParseDescriptor(node));
    if (!kLayerTypes.contains(layer.media_type)) {
      return Error(Code::kInvalidArgument, "layer.unsupported",
                   fmt::format("layers of type \"{}\" are not file systems that we can read",
                               Printable(layer.media_type)));
    }
    manifest.layers.push_back(std::move(layer));
  }
  return manifest;
}

Result<ImageDocument> ParseImageDocument(std::string_view text) {
  DSEC_TRY(const json parsed, ParseObject(text, "image config"));
  const Node root(parsed, "image config", "$");
  ImageDocument document;
  DSEC_TRY(const Node config, root.Object("config"));
  DSEC_TRY(document.config.env, config.Texts("Env"));
  DSEC_TRY(document.config.workdir, config.Text("WorkingDir"));
  DSEC_TRY(document.config.user, config.Text("User"));
  DSEC_TRY(document.config.entrypoint, config.Texts("Entrypoint"));
  DSEC_TRY(document.config.cmd, config.Texts("Cmd"));
  DSEC_TRY(const Node rootfs, root.Object("rootfs"));
  DSEC_TRY(const auto diff_ids, rootfs.Texts("diff_ids"));
  for (const std::string& diff_id : diff_ids) {
    DSEC_TRY(std::string hex, DigestHex(rootfs, "diff_ids", diff_id));
    document.diff_ids.push_back(std::move(hex));
  }
  return document;
}

Result<DockerImage> ParseDockerManifest(std::string_view text, std::string_view ref) {
  DSEC_TRY(const json parsed, ParseJson(text, "manifest.json"));
  if (!parsed.is_array()) return Malformed("manifest.json", "$", "must be a list");
  DSEC_TRY(const auto nodes, Node::Items(parsed, "manifest.json", "$"));
  std::vector<DockerImage> fitting;
  std::string choices;
  for (const Node& node : nodes) {
    DockerImage image;
    DSEC_TRY(image.config, node.Text("Config"));
    DSEC_TRY(image.layers, node.Texts("Layers"));
    DSEC_TRY(image.tags, node.Texts("RepoTags"));
    if (image.config.empty()) return node.Fail("Config", "is missing");
    bool fits = ref.empty();
    for (const std::string& tag : image.tags) {
      if (choices.size() < 500) choices += " " + Printable(tag);
      fits = fits || tag == ref;
    }
    if (fits) fitting.push_back(std::move(image));
  }
  if (fitting.size() == 1) return std::move(fitting.front());
  const bool none = fitting.empty();
  return Error(Code::kInvalidArgument, none ? "layer.ref_not_found" : "layer.ambiguous_ref",
               fmt::format("{} image for ref \"{}\"; the archive has:{}",
                           none ? "no" : "more than one", Printable(ref), choices))
      .WithField("ref");
}

}  // namespace dsec::image
