# SPDX-License-Identifier: Apache-2.0
"""What the burst benchmarks run: real projects that are built and tested with Debian's toolchains, in 64 images.

Words:

    base       the root tree of one language, by tools/bench/build_bases.sh: 0.4 to 2 GB
    extra      the files of further Debian packages of that language, a layer of its own for each image
    workspace  the source of one real project at /workspace/NAME
    image      base + extra + workspace. No two have the same extra, so no two are equal; those of a language share the
               base, and those of a project share the workspace, as images of a registry share layers.

In DSec an image is a base layer, its extra as a toolkit layer and its workspace layer. For the baseline it is an OCI image
of three layers. A task is one sandbox of an image in which the project's own build and tests run, offline.
"""

import dataclasses
import hashlib
import lzma
import pathlib
import shutil
import subprocess
import tempfile

MIRROR = "http://deb.debian.org/debian"


@dataclasses.dataclass(frozen=True)
class Project:
    """A source archive of Debian's pool with its SHA-256, or the name of a binary package that holds sources (Go)."""

    name: str
    source: str
    sha256: str
    script: str  # run by a shell in /workspace/NAME

    @property
    def layer(self):
        return f"bench-ws-{self.name}:1"


# As build servers have it for runs of a few seconds: the first compiler alone, one thread for garbage.
JUNIT = ("export JAVA_TOOL_OPTIONS='-XX:+UseSerialGC -XX:TieredStopAtLevel=1' && mkdir -p /tmp/classes &&"
         " javac -nowarn -proc:none -encoding UTF-8 -d /tmp/classes"
         " -cp /usr/share/java/junit4.jar:{lang} -sourcepath {path} {files} &&"
         " java -cp /tmp/classes:{resources}/usr/share/java/junit4.jar:/usr/share/java/hamcrest.jar:{lang}"
         " org.junit.runner.JUnitCore {tests}")


def _junit(path, resources, *tests):
    folder = path.split(":")[1]
    files = " ".join(f"{folder}/{test.replace('.', '/')}.java" for test in tests)
    return JUNIT.format(path=path, files=files, resources=resources, tests=" ".join(tests), lang="/usr/share/java/commons-lang3.jar")


def _pytest(*words):
    return f"PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 python3 -m pytest -q -p no:cacheprovider {' '.join(words)}"


def _go(package):
    return f"export HOME=/tmp GO111MODULE=off GOPATH=$PWD GOFLAGS= CGO_ENABLED=0 && cd src/{package} && go test ."


MAVEN = "src/main/java:src/test/java"
CODEC = "org.apache.commons.codec"

PROJECTS = {
    "cpp": (
        Project("tinyxml2", "pool/main/t/tinyxml2/tinyxml2_9.0.0+dfsg.orig.tar.xz",
                "96510f47a5db537f70dff3e83dd71fd2180cbba4aa76c589a549467e7f34bc9b", "make -s test"),
        Project("cjson", "pool/main/c/cjson/cjson_1.7.15.orig.tar.gz",
                "5308fd4bd90cef7aa060558514de6a1a4a0819974a26e6ed13973c5f624c24b2", "make -s test"),
        Project("bzip2", "pool/main/b/bzip2/bzip2_1.0.8.orig.tar.gz",
                "ab5a03176ee106d3f0fa90e381da478ddae405918153cca248e682cd0c4a2269", "make -s test CFLAGS='-O1 -D_FILE_OFFSET_BITS=64'"),
    ),
    "go": (
        Project("uuid", "golang-github-google-uuid-dev", "", _go("github.com/google/uuid")),
        Project("errors", "golang-github-pkg-errors-dev", "", _go("github.com/pkg/errors")),
        Project("btree", "golang-github-google-btree-dev", "", _go("github.com/google/btree")),
        Project("goversion", "golang-github-hashicorp-go-version-dev", "", _go("github.com/hashicorp/go-version")),
    ),
    "java": (
        Project("codec", "pool/main/libc/libcommons-codec-java/libcommons-codec-java_1.15.orig.tar.xz",
                "857c58c23bfe6b284b174d89f323de438042ce9a005b2a81afa658962caff90f",
                _junit(MAVEN, "src/main/resources:src/test/resources:", f"{CODEC}.binary.HexTest", f"{CODEC}.binary.Base32Test",
                       f"{CODEC}.binary.BinaryCodecTest", f"{CODEC}.net.URLCodecTest")),
        Project("args4j", "pool/main/a/args4j/args4j_2.33.orig.tar.xz",
                "62dac627ebe5e7afb105640597c87f86b1458c583a6e477d1710fd198c48231e",
                _junit("args4j/src:args4j/test", "args4j/src:args4j/test:", "org.kohsuke.args4j.ArgumentTest",
                       "org.kohsuke.args4j.SimpleStringTest")),
    ),
    "js": (
        Project("bytes", "pool/main/n/node-bytes/node-bytes_3.1.2.orig.tar.gz",
                "c95aa9c74e58721ab479c6858b1cdc6ffb887142f00acbf89096392a5d1ae9bb", "mocha --reporter dot test"),
        Project("negotiator", "pool/main/n/node-negotiator/node-negotiator_0.6.3+~0.6.1.orig.tar.gz",
                "93cb3dab566cb833fa6886c88f18591dda3a1d35d850f89056e8a36edabb65f9", "mocha --reporter dot test"),
        Project("shellquote", "pool/main/n/node-shell-quote/node-shell-quote_1.7.4+~1.7.1.orig.tar.gz",
                "c47d07f375e52ef8c5b27382a9fdc0018e1a50954a3480b13fc96c8bb0314967",
                "NODE_PATH=/usr/share/nodejs tape 'test/*.js'"),
        Project("iconv", "pool/main/n/node-iconv-lite/node-iconv-lite_0.6.3.orig.tar.gz",
                "266ae0144bb7378422caf5da543bc8aec185af1f60f4310e4e8d93aefff518a9",
                "NODE_PATH=/usr/share/nodejs mocha --reporter dot test/bom-test.js test/utf7-test.js test/utf16-test.js"),
    ),
    "python": (
        Project("toolz", "pool/main/t/toolz/toolz_0.12.0.orig.tar.gz",
                "04d555d7ccb3c84301eaad310dd27ba511ae3dcf331ada5828d7cc03942f2c2e",
                _pytest("toolz/tests/test_itertoolz.py", "toolz/tests/test_dicttoolz.py", "toolz/tests/test_functoolz.py")),
        Project("jmespath", "pool/main/p/python-jmespath/python-jmespath_1.0.1.orig.tar.gz",
                "90261b206d6defd58fdd5e85f478bf633a2901798906be2ad389150c5c60edbe", _pytest("tests")),
        Project("xmltodict", "pool/main/p/python-xmltodict/python-xmltodict_0.13.0.orig.tar.gz",
                "d74f4099d42bcca273ffd3bc9766abaa8765960eabc4399f2a6ad48cb4f58ce0", _pytest("tests")),
        Project("inflection", "pool/main/i/inflection/inflection_0.3.1.orig.tar.gz",
                "18ea7fb7a7d152853386523def08736aa8c32636b047ade55f7578c4edeb16ca", _pytest("test_inflection.py")),
        Project("sortedcontainers", "pool/main/s/sortedcontainers/sortedcontainers_2.4.0.orig.tar.gz",
                "70e22f4fd29b204f75f989e3c1e847aa1de267a028aab4233c0db783aaff78c1",
                _pytest("tests/test_coverage_sortedlist.py", "tests/test_coverage_sorteddict.py")),
    ),
}

# One word is one image: packages joined by "," make one extra layer. 13 for each language.
EXTRAS = {
    "cpp": ("libcgal-dev libicu-dev libgrpc-dev librocksdb-dev libdlib-dev libcrypto++-dev libopenblas-pthread-dev "
            "libinsighttoolkit5-dev libtorch-dev libvtk9-dev libmozjs-102-dev libclang-rt-14-dev libdpdk-dev"),
    "go": ("golang-golang-x-text-dev golang-github-klauspost-compress-dev golang-google-genproto-dev "
           "golang-github-go-playground-locales-dev golang-github-snapcore-snapd-dev golang-chroma golang-cfssl "
           "golang-github-traefik-yaegi-dev golang-gopkg-neurosnap-sentences.v1-dev golang-github-mmcloughlin-avo-dev "
           "golang-github-aquasecurity-go-dep-parser-dev golang-golang-x-image-dev golang-chroma-v2"),
    "java": ("libicu4j-java libfop-java libaspectj-java libjmol-java libfastutil-java liblucene8-java liblucene4.10-java "
             "libsnpeff-java libnb-platform18-java libvtk9-java libowlapi-java libeprosima-idl-parser-java liboscar4-java"),
    "js": ("node-caniuse-db node-opencv node-mdn-browser-compat-data node-moment-timezone libjs-mathjax nodejs-doc "
           "libjs-openlayers,node-lumino libjs-pdf,node-lodash libjs-three,node-vega libjs-of-ocaml libjs-dojo-dojox,libjs-dojo-core "
           "node-react-dom,node-fetch node-babel7-standalone,node-inquirer"),
    "python": ("python3-statsmodels python3-django python3-sympy python3-astropy python3-mypy python3-jieba python3-satpy "
               "python3-qutip python3-plotly python3-fitz python3-skimage python3-rdkit python3-botocore"),
}
LANGUAGES = tuple(sorted(EXTRAS))

# What agents bring along in `workspace_time`: search tools and a debugger, one toolkit layer.
TOOLS = ("ripgrep", "fd-find", "jq", "libjq1", "libonig5", "strace", "libunwind8", "gdb-minimal", "libsource-highlight4v5", "vim-tiny")


@dataclasses.dataclass(frozen=True)
class Image:
    """One image and the project that is its task."""

    number: int
    language: str
    packages: tuple
    project: Project

    @property
    def base(self):
        return f"bench-{self.language}:1"

    @property
    def extra(self):
        return f"bench-{self.language}-{self.packages[0].replace('+', 'p')}:1"

    @property
    def layers(self):
        """Names of its layers, lowest first."""
        return (self.base, self.project.layer, self.extra)

    @property
    def ref(self):
        return f"bench-{self.number}"


def images(count):
    """The first `count` images; languages take turns."""
    made = []
    for number in range(count):
        language = LANGUAGES[number % len(LANGUAGES)]
        turn = number // len(LANGUAGES)
        words = EXTRAS[language].split()
        if turn >= len(words):
            raise ValueError(f"there are {sum(len(words.split()) for words in EXTRAS.values())} images at most")
        projects = PROJECTS[language]
        made.append(Image(number, language, tuple(words[turn].split(",")), projects[turn % len(projects)]))
    return made


class Archive:
    """Debian's mirror: files checked against a SHA-256, of the package index or of the caller; kept in `folder`."""

    def __init__(self, folder, mirror=MIRROR):
        self.folder = pathlib.Path(folder)
        self.mirror = mirror.rstrip("/")
        self._packages = None
        self.folder.mkdir(parents=True, exist_ok=True)

    def fetch(self, path, sha256):
        """Path of the local copy of a file of the mirror."""
        target = self.folder / path.rsplit("/", 1)[1]
        if not target.exists() or hashlib.sha256(target.read_bytes()).hexdigest() != sha256:
            partial = target.with_name(target.name + ".partial")
            subprocess.run(["curl", "-sSf", "--retry", "3", "-o", partial, f"{self.mirror}/{path}"], check=True)
            actual = hashlib.sha256(partial.read_bytes()).hexdigest()
            if actual != sha256:
                raise RuntimeError(f"{path}: expected sha256 {sha256}, got {actual}")
            partial.rename(target)
        return target

    def package(self, name):
        """Path of the local copy of a binary package."""
        if self._packages is None:
            self._packages = self._index()
        if name not in self._packages:
            raise RuntimeError(f"the mirror has no package {name}")
        return self.fetch(*self._packages[name])

    def _index(self):
        """{package: (path, sha256)} of bookworm main for amd64."""
        target = self.folder / "Packages.xz"
        if not target.exists():
            partial = target.with_name("Packages.xz.partial")
            address = f"{self.mirror}/dists/bookworm/main/binary-amd64/Packages.xz"
            subprocess.run(["curl", "-sSf", "--retry", "3", "-o", partial, address], check=True)
            partial.rename(target)
        index, fields = {}, {}
        with lzma.open(target, "rt", encoding="utf-8") as lines:
            for line in lines:
                if line == "\n":
                    index[fields["Package"]] = (fields["Filename"], fields["SHA256"])
                    fields = {}
                elif not line.startswith(" "):
                    key, _, value = line.partition(":")
                    fields[key] = value.strip()
        return index


def _normal(tree):
    """One time for all files and plain modes of folders: the same layer each time."""
    subprocess.run(["find", tree, "-exec", "touch", "-h", "-d", "@1", "{}", "+"], check=True)


def extract_packages(archive, names, tree):
    """The files of packages, as dpkg would lay them out; no maintainer script runs."""
    for name in names:
        subprocess.run(["dpkg-deb", "-x", archive.package(name), tree], check=True)
    # In the bases /bin, /lib and /sbin are links into /usr; a folder of that name in a layer above would hide them.
    for name in ("bin", "lib", "lib64", "sbin"):
        if (tree / name).is_dir():
            shutil.copytree(tree / name, tree / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(tree / name)
    tree.chmod(0o755)
    _normal(tree)


def extract_project(archive, project, tree):
    """The source of a project at TREE/workspace/NAME."""
    target = tree / "workspace" / project.name
    target.mkdir(parents=True)
    if project.sha256:
        source = archive.fetch(project.source, project.sha256)
        subprocess.run(["tar", "-xf", source, "--strip-components=1", "--no-same-owner", "-C", target], check=True)
    else:
        with tempfile.TemporaryDirectory(dir=tree.parent) as unpacked:
            subprocess.run(["dpkg-deb", "-x", archive.package(project.source), unpacked], check=True)
            shutil.copytree(pathlib.Path(unpacked, "usr/share/gocode/src"), target / "src", symlinks=True)
    tree.chmod(0o755)
    _normal(tree)
