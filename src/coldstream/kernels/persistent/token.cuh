// What the kernel of one launch a token is given: lists for every block, which program.py makes, and where
// weights and activations are.
#pragma once

#include "cuda/quantize.cuh"
#include "cuda/weight_ring.cuh"
#include "persistent/streams.cuh"

namespace coldstream {

constexpr int max_layer_matrices = 13, max_layer_vectors = 6;

constexpr int max_down_rows = 64;
constexpr int row_bytes_of_group = 288;  // of a quantised row in shared memory, with its sums and its scale

// Places behind the rings in a block's shared memory, in bytes.
struct RowPlaces {
  int raw;      // floats: the inputs of a norm
  int normed;   // and its outputs, for matrices of floats
  int hidden;   // quantised rows of the chosen experts and the shared one
  int outputs;  // floats: a row of max_down_rows of each of these
  int codes;    // a quantised row
  int kept;     // floats: a key head's last inputs
  int lists;
};

enum StepOp { op_products, op_add, op_mix, op_gate_up, op_down };
enum StepLoad { load_nothing, load_norm, load_mixed, load_row, load_hidden };
// Of a layer's vectors.
enum LayerVector { attn_norm, ffn_norm, conv_taps, ssm_a, ssm_dt_bias, ssm_norm };

// One phase of a block. Counters are those of the layer, negative ones of the layer before; places are words
// of the activations.
struct Step {
  int op;
  int wait;  // for this counter
  int target;
  int raise;
  int load;
  int source;
  int vector;  // of the layer's, which the load multiplies with
  int out;
  int ring;  // of its pieces
  int first_piece;
  int num_pieces;
  int first_row;  // of outputs that the whole block sums, or of a mixer the first column of its state
  int num_rows;
  int groups;     // of the quantised inputs
  int key_head;   // of a mixer
  int keeps_key;  // whether the block keeps the inputs of the key head for the next token
};

// What a stage of a ring holds: rows of a matrix, in `copies` parts from the matrix, or from some experts'.
struct Piece {
  int wait;  // before its address is known
  int target;
  int matrix;  // of the layer's
  int offset;  // bytes from its begin, or from an expert's
  int copies;
  int copy_bytes;
  int from_stride;  // bytes from part to part in the matrix; 0 where they are of experts
  int to_stride;    // and in the stage
  int rank;         // of the first expert among the chosen ones; -1 for none
  int shape;
  int first_row;  // of the matrix
  int rows;       // of a matrix, in the stage
  int slot;       // of the first expert's inputs and outputs
  int expert_bytes;
};

// Where a block's lists for a kind of layer begin, and how long they are.
struct BlockLists {
  int first_step;
  int num_steps;
  int first_piece[max_rings];
  int num_pieces[max_rings];
};

// A layer's weights. Of experts: those of expert 0, behind which the others lie in order.
struct LayerWeights {
  const uint8_t* matrices[max_layer_matrices];
  const float* vectors[max_layer_vectors];
  float* conv_state;
  float* state;
  int64_t kind;
};

// When the first warp of a block was where in a step, in cycles.
struct Stamps {
  uint32_t begins;
  uint32_t sees;  // inputs that others have written
  uint32_t loaded;
  uint32_t ends;
  uint32_t waited;  // for bytes, of all pieces
};

// A launch, for all blocks.
struct TokenProgram {
  const Step* steps;
  const Piece* pieces;
  const BlockLists* lists;  // [blocks, kinds]
  const MatrixShape* shapes;
  const LayerWeights* layers;
  float* activations;  // of each layer, and behind the last one
  Counters counters;
  uint32_t* report;
  uint32_t* stamps;  // [layers, slots, blocks] of `Stamps`
  int num_layers;
  int num_kinds;
  int num_shapes;
  int num_slots;  // the most steps of a block in a layer
  int hidden;
  int ffn;
  int num_experts;
  int chosen;
  int key_heads;
  int value_heads;
  int proj;         // place in the activations: queries, keys and values, z, alpha, beta
  int layer_words;  // of the activations
  int is_patient;
  int logits;  // place in the activations; the shared expert's gate lies behind those of all experts
  int stages[max_rings];
  int stage_bytes[max_rings];
  RowPlaces rows;
  float eps;
  uint64_t limit_ns;
};

}  // namespace coldstream
