"""Deliberate faults, each of which the conformance kit must catch: one replacement in one file."""

import connector_mutations
import feature_mutations
import format_mutations
import later_mutations
import pooling_mutations
import prompt_mutations
import quantised_mutations
import recurrent_mutations
import step_mutations

MUTATIONS = [
    *step_mutations.MUTATIONS,
    *feature_mutations.MUTATIONS,
    *quantised_mutations.MUTATIONS,
    *recurrent_mutations.MUTATIONS,
    *pooling_mutations.MUTATIONS,
    *format_mutations.MUTATIONS,
    *prompt_mutations.MUTATIONS,
    *connector_mutations.MUTATIONS,
    *later_mutations.MUTATIONS,
]
"""Deliberate faults in the order of the table in docs/tables/faults.md."""
