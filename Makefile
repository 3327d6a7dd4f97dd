PYTHON ?= python3
VENV := $(if $(OLDEST),.venv-oldest,.venv)
BIN := $(VENV)/bin
INSTALL := $(PYTHON) tools/install.py $(VENV)

.PHONY: ci install demo test test-gpu test-aarch64 ray agents lint wheels sanitize sanitizers sanitize-gpu faults site clean install-test

install:
	@$(INSTALL)

demo: install
	$(BIN)/coldstream run -p 'def read_lines(path):' -n 96 --temp 0.5 --seed 3

# After `install`, which would write into the same environment.
install-test: $(if $(OLDEST),,install)
	@$(INSTALL) test $(if $(OLDEST),--oldest)

# C++ and CUDA; after a change: .venv/bin/clang-format -i FILES
NATIVE_SOURCES := $(shell find src tests -name '*.h' -o -name '*.cpp' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')

ISSUE_FORMS := $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))

lint: install-test
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.prose --check
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(ISSUE_FORMS)
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

# With OLDEST=1: on the oldest versions that pyproject.toml allows, in an environment of its own; types are those of the newest.
# With LINTED=1: where `lint` has passed. With JOBS=N: in so many processes, which begin at different files, and one that has
# no tests left takes some of another's; where there is a GPU, tests of its memory want it to themselves.
# With SHARD=HASH: of tests marked `sharded` a third of the cases, or what they say, and half of random examples, as in CI.
PYTEST_JOBS := $(if $(JOBS),-n $(JOBS) --dist worksteal) $(if $(SHARD),--shard=$(SHARD))

test: $(if $(OLDEST)$(LINTED),install-test,lint)
	$(BIN)/python -m pytest $(PYTEST_JOBS) --durations=40 --durations-min=5

# The extension with AddressSanitizer and UndefinedBehaviorSanitizer, in an environment with nothing but what builds it, so that
# it can be built while `demo` installs. For a shard it is not optimised: that takes less time than its tests take longer. It has
# one of the two sanitizers then, by the hash, as compiling for both takes about as long as for one and then for the other. Tiles
# are emulated, because sanitizers do not see what tile instructions read and write, and so that CPUs without them run these
# kernels too.
SANITIZE := build/sanitize
BUILDER := $(SANITIZE)/builder/bin
SANITIZERS := address,undefined
# The latter in any case: it brings the C++ library, where AddressSanitizer looks for how to throw as the program begins.
PRELOADED := $(if $(findstring address,$(SANITIZERS)),$(shell gcc -print-file-name=libasan.so)) $(shell gcc -print-file-name=libubsan.so)

$(BUILDER)/ninja: pyproject.toml
	$(PYTHON) -m venv $(SANITIZE)/builder
	$(BUILDER)/pip --disable-pip-version-check install -q 'nanobind>=3.1' 'cmake>=3.25' ninja
	touch $@

sanitizers: $(BUILDER)/ninja
	$(BUILDER)/cmake -S . -B $(SANITIZE)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BUILDER)/ninja \
		-DCOLDSTREAM_SANITIZE=$(SANITIZERS) -DCOLDSTREAM_EMULATE_AMX=ON -DCMAKE_BUILD_TYPE=None \
		-DCOLDSTREAM_OPTIMISATION=$(if $(SHARD),-O0,-O1) \
		-DPython_EXECUTABLE=$(CURDIR)/$(BUILDER)/python -Dnanobind_DIR=$$($(BUILDER)/python -m nanobind --cmake_dir) > /dev/null
	$(BUILDER)/cmake --build $(SANITIZE)/cmake -- -j 2

# The tests that feed it hostile bytes or awkward sizes, without those of a GPU's kernels. For a shard a third of the cases that a commit's tests have: those are tried without sanitizers
# as well. The sources are copied beside it, because an editable installation would find the plain extension first.
sanitize: install-test sanitizers
	$(PYTHON) -m venv --without-pip $(SANITIZE)/venv
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$(echo $(SANITIZE)/venv/lib/python3*/site-packages)/installed.pth
	rm -rf $(SANITIZE)/package && mkdir $(SANITIZE)/package
	tar -C src --exclude=__pycache__ -cf - coldstream | tar -C $(SANITIZE)/package -xf -
	cp $(SANITIZE)/cmake/_csrc*.so $(SANITIZE)/package/coldstream/kernels/
	LD_PRELOAD='$(PRELOADED)' ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=$(SANITIZE)/package \
		$(SANITIZE)/venv/bin/python -m pytest $(PYTEST_JOBS) $(if $(SHARD),--one-in=3) \
		tests/models/test_damaged_models.py tests/kernels/test_cpu_linear.py tests/kernels/test_cpu_experts.py \
		tests/kernels/test_cpu_weight.py tests/kernels/test_cpu_attention.py \
		tests/kernels/test_cpu_integer_attention.py tests/kernels/test_cpu_gated_delta_net.py \
		tests/kernels/test_cpu_router.py tests/kernels/test_router_rules.py tests/kernels/test_attention_kinds.py \
		tests/kernels/test_indexer.py tests/kernels/test_glu.py tests/kernels/test_expert_sizes.py \
		tests/kernels/test_hyper_connections.py tests/kernels/test_ngram_embedding.py tests/kernels/test_expert_pool.py \
		tests/kernels/test_held_experts.py tests/kernels/test_cpu_commit.py tests/kernels/test_cpu_state_boundaries.py \
		tests/kernels/test_cpu_row_ops.py tests/kernels/test_runtime.py --cpu-only \
		--deselect tests/kernels/test_expert_sizes.py::test_a_whole_expert_of_gpt_oss \
		--deselect tests/kernels/test_hyper_connections.py::test_kernels_compile

# The tests that need the extra `ray`, in an environment of its own over the other one, which stays without its 380 MB.
RAY := $(VENV)-ray

ray: install-test
	$(PYTHON) tools/install.py $(RAY) ray --beside $(VENV)
	$(RAY)/bin/python -m pytest tests/ray/test_replicas.py

# Claude Code, Codex and opencode from npm in conversations with the server; with NEWEST=1 their newest versions, whose results
# are not those of docs/agents.md. Takes Node.js, 1.3 GB in .agents and a quarter of an hour, so CI replays their requests instead.
agents: install-test
	$(BIN)/python -m tools.agents $(if $(NEWEST),--newest,--out docs/results/agents.json --record tests/server/recorded)

# All planted faults, as in a nightly job, and their results; with SAMPLE=1 a part that the hash of the commit chooses.
faults: install-test
	$(BIN)/python -m pip --disable-pip-version-check install -q 'cmake>=3.25' ninja
	$(BIN)/python -m tools.planted_faults $(if $(SAMPLE),--sample,--out docs/results/planted_faults.json)

# The tests that need a GPU, counted into the file that docs/performance.md is made from.
test-gpu: install-test
	$(BIN)/python -m tests.audits.gpu_tests --jobs 6 --out docs/results/gpu/tests.json

# The GPU's kernels under compute-sanitizer, which comes with the CUDA toolkit; about ten minutes.
sanitize-gpu: install-test
	$(BIN)/python -m tests.audits.gpu_sanitizer --out docs/results/gpu/sanitizer.json

# The sdist and the wheels of what is committed, each tried as a user would: one for CPython 3.11 and one for 3.12 and newer. With
# TRIAL=1 only that of this Python, not optimised, nor kept in dist. With MACHINE=aarch64 for such machines; those are not tried.
wheels:
	$(PYTHON) -m tools.package $(if $(TRIAL),build/trial --trial --python $(PYTHON),dist) $(if $(MACHINE),--machine $(MACHINE))

# The tests that run the CPU's kernels, in a wheel for aarch64 of what is committed, on a CPU that qemu emulates. Takes
# python3.11, and debootstrap, which takes root.
test-aarch64:
	rm -rf build/aarch64/wheel
	$(PYTHON) -m tools.package build/aarch64/wheel --machine aarch64 --python python3.11
	$(PYTHON) -m tools.aarch64 build/aarch64/wheel/*_aarch64.whl

# docs/ as a website in build/site, in an environment of its own over the other one. Broken links and anchors are errors.
SITE := $(VENV)-site

# Where tests are installed as well, after them: both look at what the environment has.
site: $(if $(filter lint ray sanitize test,$(MAKECMDGOALS)),install-test,install)
	$(PYTHON) tools/install.py $(SITE) site --beside $(VENV)
	$(BIN)/python -m bench.report.result_files docs/result_files.md
	$(SITE)/bin/python -m sphinx --fail-on-warning --keep-going --quiet -d build/doctrees docs build/site
	rm -rf build/site/results && cp -r docs/results build/site/

# What the workflow `tests` runs.
ci:
	.ci/run

clean:
	rm -rf build dist .venv .venv-oldest .venv-ray .venv-site .ci-venv .ci-venv-ray .ci-venv-site .agents
