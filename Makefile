# SPDX-License-Identifier: Apache-2.0
# Everything goes through here; see README.md. Run as root on Debian 12.
SHELL := /bin/bash
JOBS ?= $(shell nproc)
PRESET ?= dev
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

.PHONY: help setup build demo test unit bench asan tsan lint format clean

help:
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: ## install the Debian packages that build, tests and demo need
	@tools/setup/install_deps.sh

build: setup ## configure and build PRESET (dev)
	@cmake --preset $(PRESET) > /dev/null
	@cmake --build --preset $(PRESET) -j $(JOBS)

demo: ## install, build, start the platform and run the main job on real input; SHARED=moosefs: layers on a cluster file system
	@$(MAKE) --no-print-directory build PRESET=dev
	@SHARED=$(SHARED) tools/demo/run_demo.sh

test: ## every test, lint included; prints skips with reasons
	@$(MAKE) --no-print-directory build PRESET=dev
	@tools/test/run_tests.py --build build/dev
	@$(MAKE) --no-print-directory asan

unit: build ## only the fast tests without root
	@ctest --test-dir build/$(PRESET) -L unit -j $(JOBS) --output-on-failure

asan: setup ## unit, component and fuzz tests under ASan and UBSan
	@cmake --preset asan > /dev/null
	@cmake --build --preset asan --target dsec_fast_tests -j $(JOBS)
	@tools/test/run_tests.py --build build/asan --only unit,component,fuzz

tsan: setup ## unit and component tests under TSan
	@cmake --preset tsan > /dev/null
	@cmake --build --preset tsan --target dsec_fast_tests -j $(JOBS)
	@tools/test/run_tests.py --build build/tsan --only unit,component

bench: ## all benchmarks; figures in build/bench/figures.jsonl
	@$(MAKE) --no-print-directory build PRESET=dev
	@cmake --build --preset dev --target sandbox_fncall_bench -j $(JOBS)
	@/usr/bin/python3 bench/run.py --build build/dev

lint: build ## layering, headers, names, format, clang-tidy
	@ctest --test-dir build/$(PRESET) -L lint --output-on-failure

format: ## rewrite all C++ files with clang-format
	@git ls-files '*.h' '*.cc' | xargs -r clang-format-19 -i

clean:
	@rm -rf build
