// The entries of a table of AArch64: the two tiers differ in `gemv` and `gemm` alone.
// clang-format off
.quantize_row = quantize_row_neon,
.gemv = gemv,
.gemm = gemm,
.gemm_bytes = panel_memory<PanelNeon>(),
.gemm_min_rows = [](QuantType) { return 6; },
.pack = pack_neon,
.float_product = float_product_neon,
.dequantize_row = dequantize_row_neon,
.glu = glu_neon,
    // clang-format on
