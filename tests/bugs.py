"""The bugs that `tests/mutants.py` puts in, and the tests that ought to see them.

Few and fast tests each: what is asked is whether anything looks at the line, not whether the
whole suite does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """A text of a file in `src/pmaf`, and what to write in its place.

    `argued` says why it is right that no test sees the bug, if it is.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str  # names of tests in the folder `tests`, with blanks between them
    argued: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(f"tests/{name}" for name in self.tests.split())


IED_GRADIENTS = (
    "test_ied_gradients.py::test_first_and_second_derivatives[largest-Dense()-2] "
    "test_ied_gradients.py::test_first_and_second_derivatives[smallest-Dense()-2]"
)
LESS_GRADIENTS = (
    "test_less_gradients.py::test_derivatives_of_a_batch[Implicit()-()-(3,)] "
    "test_less_gradients.py::test_derivatives_of_a_batch[Implicit()-(3,)-()]"
)
DDN_GRADIENTS = "test_less_gradients.py::test_derivatives_of_a_batch[DDN(exploit=True)-(3,)-()]"
ITERATION = "test_ied_gradients.py::test_krylov_backward_of_a_large_matrix"
CLOSE = (
    "test_ied_sizes.py::test_gradients_of_close_eigenvectors[500-1e-05-flat-None-True-None] "
    "test_ied_sizes.py::test_gradients_of_close_eigenvectors[500-1e-05-flat-2-True-None] "
    "test_ied_sizes.py::test_gradients_of_close_eigenvectors[500-1e-05-flat-2-True-Dense()] "
    "test_ied_sizes.py::test_gradients_of_close_eigenvectors[250-9e-06-flat-None-True-None]"
)
LARGE_LESS = (
    "test_less_cholesky.py::test_what_float32_does_not_bound_is_proved_by_probes "
    "test_less_cholesky.py::test_large_problems_with_a_small_or_negative_multiplier "
    "test_less_cholesky.py::test_two_factors_are_enough_for_large_problems"
)
CHOLESKY = (
    "test_less_cholesky.py::test_value_report_and_gradient[40-20-0.3-dtype0] "
    "test_less_cholesky.py::test_value_report_and_gradient[24-24-0.03-dtype1] "
    "test_less_cholesky.py::test_value_report_and_gradient[300-256-1.0-dtype1] "
    "test_less_cholesky.py::test_ill_conditioned_matrices_lose_no_digits "
    "test_less_cholesky.py::test_only_what_is_not_proved_is_handed_over "
    "test_less_cholesky.py::test_a_direction_that_b_does_not_see_is_not_forgotten "
    "test_less_cholesky.py::test_ill_conditioned_matrices_are_handed_over "
    "test_less_cholesky.py::test_a_product_that_is_only_rounding_does_not_decide "
    "test_less_cholesky.py::test_a_small_gap_has_its_digits "
    "test_less_cholesky.py::test_a_multiplier_that_is_corrected_has_to_prove_itself_again "
    "test_less_hard_cases.py"
)
MULTIPLIER = (
    "test_less_gradients.py::test_the_multiplier_is_differentiable "
    "test_declared.py::test_derivatives_of_any_order"
)
TALL = (
    "test_less_sizes.py::test_tall[1-1000-40-1000-inner-None] "
    "test_less_sizes.py::test_tall[300-2000-14-1000-inner-None] "
    "test_less_sizes.py::test_tall[1-30000-3-1000-inner-None]"
)
SPAN = "test_krylov.py::test_gradients_of_what_happens_inside_the_span"
WARM = "test_krylov.py::TestWarmStarts"
HONEST = "test_krylov.py::TestHonesty"
OVERTAKEN = (
    f"{WARM}::test_whatever_place_it_has_a_vector_that_has_been_overtaken_is_left"
    "[near-False-torch.float64] "
    f"{WARM}::test_whatever_place_it_has_a_vector_that_has_been_overtaken_is_left"
    "[near-True-torch.float64]"
)

SPECTRUM = [
    Bug(
        "eigenvalues count as one a hundred times too early",
        "linalg/roundings.py",
        "return EQUAL * torch.finfo(dtype).eps",
        "return 800 * torch.finfo(dtype).eps",
        f"{CLOSE} test_less_traps.py",
    ),
    Bug(
        "eigenvalues never count as one",
        "linalg/roundings.py",
        "return EQUAL * torch.finfo(dtype).eps",
        "return 0.01 * torch.finfo(dtype).eps",
        "test_ied_sizes.py::test_equal_eigenvalues_are_still_found_equal",
    ),
    Bug(
        "rank tolerance grows as if with the size of the matrix",
        "linalg/roundings.py",
        "    return merge_tolerance(dtype)\n",
        "    return 30_000 * torch.finfo(dtype).eps\n",
        f"{TALL} test_less_traps.py",
    ),
    Bug(
        "pull of b along singular vectors of no singular value",
        "linalg/gram.py",
        "rmatvec(vectors, rmatvec(A, b)) * present",
        "rmatvec(vectors, rmatvec(A, b))",
        "test_less_sizes.py::test_rounding_is_not_a_singular_value",
    ),
    Bug(
        "squares of a promoted spectrum are rounding, not zero",
        "linalg/gram.py",
        "s, squares = s * present, squares * present",
        "s = s * present",
        "test_less_sizes.py::test_rounding_is_not_a_singular_value",
    ),
    Bug(
        "ball: any minimiser is certified",
        "layers/constrained.py",
        "present.sum(-1) < rows.n, norm(",
        "present.sum(-1) < 0, norm(",
        "test_less_ranks.py::test_only_the_minimiser_of_least_norm_is_certified",
    ),
    Bug(
        "ball: any minimiser is certified by products",
        "layers/constrained.py",
        "return _of_least_norm(found, _null_part(problem, seen, w))",
        "return found",
        "test_less_ranks.py::test_only_the_minimiser_of_least_norm_is_certified",
    ),
    Bug(
        "blocks of a large Gram matrix end at the wrong row",
        "linalg/gram.py",
        "left, right, into = A[..., low:high].mT, A[..., low:], upper[:, low:high, low:]",
        "left, right, into = A[..., low:high].mT, A[..., high:], upper[:, low:high, high:]",
        "test_less_cholesky.py::test_large_problems_are_not_handed_over",
    ),
    Bug(
        "tangent solve without its fallback",
        "tangent/basis.py",
        "nu = torch.addcmul(p, self.low, s_vy) * self.over_d + s_vy * self.fallback",
        "nu = torch.addcmul(p, self.low, s_vy) * self.over_d",
        "test_less_gradients.py::test_gradients_are_finite_everywhere test_less_hard_cases.py",
    ),
    Bug(
        "several lowest directions, off by one",
        "tangent/basis.py",
        "n - (~lowest).sum(-1, keepdim=True) > 1",
        "n - (~lowest).sum(-1, keepdim=True) > 2",
        "test_less_gradients.py::test_gradients_are_finite_everywhere test_less_hard_cases.py",
    ),
    Bug(
        "several lowest directions where there is one",
        "tangent/basis.py",
        "n - (~lowest).sum(-1, keepdim=True) > 1",
        "n - (~lowest).sum(-1, keepdim=True) > 0",
        "test_less_traps.py test_less_conditioning.py test_less_hard_cases.py",
    ),
    Bug(
        "lowest directions are not coupled to the others",
        "tangent/basis.py",
        "coupled = (self.s_yy * along - s_vy * y_low) * self.over_d",
        "coupled = self.s_yy * along * self.over_d",
        "test_less_gradients.py::test_derivative_of_b_zero_in_A_follows_the_smallest_singular_vector"
        " test_less_gradients.py::test_derivatives_at_a_tie_are_those_of_the_branch",
    ),
    Bug(
        "what the basis does not span gets no solution",
        "tangent/basis.py",
        "z = z + solve_lowest(self.y_rest, v_rest)",
        "z = z + 0 * solve_lowest(self.y_rest, v_rest)",
        "test_less_gradients.py::test_derivatives_at_a_tie_are_those_of_the_branch",
    ),
    Bug(
        "tangent solution is not projected at the end",
        "tangent/basis.py",
        "return z - self.y * dot(self.y, z).unsqueeze(-1)",
        "return z",
        f"test_less_conditioning.py {TALL} test_less_hard_cases.py",
        argued="The solution is orthogonal to y up to rounding already, which the projection "
        "removes.",
    ),
    Bug(
        "tangent solve divides by small squares twice as early as it may",
        "tangent/basis.py",
        "tiny = merge_tolerance(y.dtype) ** 2",
        "tiny = merge_tolerance(y.dtype)",
        "test_less_traps.py test_less_conditioning.py",
    ),
    Bug(
        "amplification forgets the coupled direction",
        "tangent/basis.py",
        "torch.stack([coupled, inverse.amax(-1), across]).amax(0)",
        "torch.stack([inverse.amax(-1), across]).amax(0)",
        "test_less_conditioning.py::test_how_much_a_tangent_solve_magnifies",
    ),
    Bug(
        "amplification forgets merged eigenvalues",
        "tangent/basis.py",
        "torch.stack([coupled, inverse.amax(-1), across]).amax(0)",
        "torch.stack([coupled, inverse.amax(-1)]).amax(0)",
        "test_less_traps.py test_less_conditioning.py",
    ),
]

IED_RULES = [
    Bug(
        "inside the span: wrong sign",
        "gradients/eigenvectors.py",
        "difference = values.unsqueeze(-1) - values.unsqueeze(-2)",
        "difference = values.unsqueeze(-2) - values.unsqueeze(-1)",
        f"{IED_GRADIENTS} {ITERATION}",
    ),
    Bug(
        "inside the span: transposed",
        "gradients/eigenvectors.py",
        "        inside = v @ y.mT\n        apart",
        "        inside = y @ v.mT\n        apart",
        f"{IED_GRADIENTS} {ITERATION}",
    ),
    Bug(
        "inside the span: left out",
        "gradients/eigenvectors.py",
        "return z if y.shape[-2] == 1 else z + self._within(v, y, tensors, state)",
        "return z",
        f"{IED_GRADIENTS} {ITERATION}",
    ),
    Bug(
        "rise of several vectors in the opposite order",
        "gradients/eigenvectors.py",
        "rise = state.shift.unsqueeze(-1) - values.unsqueeze(-2)",
        "rise = state.shift.flip(-1).unsqueeze(-1) - values.unsqueeze(-2)",
        IED_GRADIENTS,
    ),
    Bug(
        "a bordered solve without its test for repeated eigenvalues",
        "gradients/eigenvectors.py",
        "repeated = ~(length * merge_tolerance(v.dtype) < 1) | (info != 0)[..., None, None]",
        "repeated = (info != 0)[..., None, None].expand_as(length)",
        "test_ied_repeated.py::"
        "test_a_repeated_dominant_eigenvalue_that_is_known_up_to_rounding "
        "test_ied_repeated.py::test_nilpotent",
    ),
    Bug(
        "a bordered solve forgets the gradient of the value",
        "gradients/eigenvectors.py",
        "((self.y * p).sum(-1, keepdim=True) - target)",
        "(self.y * p).sum(-1, keepdim=True)",
        "test_ied_gradients.py::test_nonsymmetric_matches_differences_of_eig",
    ),
    Bug(
        "shifts of equal eigenvalues are not coupled",
        "tangent/bordered.py",
        "return shift + 0.5 * (coupling + coupling.mT)",
        "return shift + 0 * (coupling + coupling.mT)",
        "test_ied_repeated.py::test_derivatives_of_projectors",
    ),
    Bug(
        "thresholds by the Frobenius norm",
        "tangent/kept.py",
        "return torch.linalg.vector_norm(self.values.unsqueeze(-2), math.inf, -1, keepdim=True)",
        "return torch.linalg.vector_norm(self.values, dim=-1)[..., None, None]",
        CLOSE,
    ),
    Bug(
        "thresholds by the Frobenius norm, without a basis",
        "gradients/eigenvectors.py",
        "state.kept.size(lambda: largest_modulus(tensors[0], state.shift))",
        "torch.linalg.matrix_norm(tensors[0])[..., None, None]",
        CLOSE,
    ),
    Bug(
        "lifted matrix with the wrong sign",
        "gradients/eigenvectors.py",
        "(size * y).mT @ y - A, eye",
        "-(size * y).mT @ y - A, eye",
        "test_ied_gradients.py::test_nonsymmetric_second_derivatives",
        argued="Any multiple of yyᵀ but zero makes the matrix regular, and on the complement of y "
        "they are all the same.",
    ),
    Bug(
        "a gradient that is not symmetric",
        "gradients/eigenvectors.py",
        "    z = 0.5 * z\n    return torch.cat([z, y], -2).mT @ torch.cat([y, z], -2)",
        "    return z.mT @ y",
        IED_GRADIENTS,
    ),
    Bug(
        "DDN hessian without its lift along y",
        "gradients/eigenvectors.py",
        "return 2 * value * eye - (self.A + self.A.mT) + lift * outer",
        "return 2 * value * eye - (self.A + self.A.mT) + 0 * lift * outer",
        "test_ied_gradients.py::test_the_papers_rules_are_exact_for_symmetric_matrices",
    ),
    Bug(
        "IFT: projection dropped",
        "gradients/eigenvectors.py",
        "return eye - image + row.mT @ (row @ image)",
        "return eye - image + 0 * row.mT @ (row @ image)",
        "test_ied_gradients.py::test_the_papers_rules_are_exact_for_symmetric_matrices",
    ),
]

TANGENT = [
    Bug(
        "second derivatives without the mask of linked vectors",
        "tangent/bordered.py",
        "if linked is not None:",
        "if False:",
        "test_ied_repeated.py::test_second_derivatives_of_simple_eigenvectors",
        argued="Where eigenvalues differ the multipliers are zero up to rounding, and the products "
        "of two eigenvectors with the matrix stay zero in whatever way it changes: the mask only "
        "keeps their rounding out.",
    ),
    Bug(
        "second derivatives without the multiplier of the second solve",
        "tangent/bordered.py",
        "dy = -(nu.mT @ w + omega.mT @ z)",
        "dy = -(nu.mT @ w)",
        LESS_GRADIENTS,
    ),
    Bug(
        "second derivatives without the multiplier of the first solve",
        "tangent/bordered.py",
        "dy = -(nu.mT @ w + omega.mT @ z)",
        "dy = -(omega.mT @ z)",
        LESS_GRADIENTS,
    ),
    Bug(
        "second derivatives without the derivative of the shift",
        "tangent/bordered.py",
        "return None, None, w, dy, *d_tensors, -d_shift, None, None, None, None",
        "return None, None, w, dy, *d_tensors, None, None, None, None, None",
        LESS_GRADIENTS,
    ),
    Bug(
        "second derivatives with the matrix of the wrong sign",
        "tangent/bordered.py",
        "(*(None if x is None else -x for x in d_tensors), None)[:2]",
        "(*d_tensors, None)[:2]",
        LESS_GRADIENTS,
    ),
    Bug(
        "DDN divides by one",
        "gradients/ddn.py",
        "ratio = dot(y, s) / torch.where(along == 0, 1, along)",
        "ratio = dot(y, s)",
        DDN_GRADIENTS,
    ),
    Bug(
        "IFT solves with the matrix instead of its transpose",
        "gradients/ift.py",
        "torch.linalg.solve(H.mT, v.unsqueeze(-1))",
        "torch.linalg.solve(H, v.unsqueeze(-1))",
        "test_ied_gradients.py::test_for_nonsymmetric_matrices_ift_is_exact_and_ddn_is_not",
    ),
]

LEAN = []

ATTACH = [
    Bug(
        "units: eigenvalues stay in those of the search",
        "reductions/units.py",
        "multiplier=self._multiplied(found.multiplier, self.several),",
        "multiplier=found.multiplier,",
        "test_range.py::test_traced_eigenvectors_at_any_scale",
    ),
    Bug(
        "units: a basis without its spread scaled",
        "tangent/kept.py",
        "return type(self)(self[0], self[1] * unit.unsqueeze(-1) ** power)",
        "return self",
        "test_range.py::test_traced_gradients_of_entries_whose_sum_overflows",
    ),
    Bug(
        "units: the gap stays in those of the search",
        "reductions/units.py",
        "            gap=self._multiplied(found.gap),\n",
        "            gap=found.gap,\n",
        "test_range.py::test_traced_eigenvectors_at_any_scale",
    ),
    Bug(
        "rules for one vector forget the gradient of the values",
        "gradients/eigenvectors.py",
        "dA = (weighted * y).mT @ y",
        "dA = 0 * (weighted * y).mT @ y",
        "test_ied_gradients.py::test_the_papers_rules_are_exact_for_symmetric_matrices",
    ),
    Bug(
        "rules for one vector take every value for a constant of the vector",
        "gradients/eigenvectors.py",
        "v = v + weighted * (y @ A + y @ A.mT)",
        "v = v + 0 * weighted * (y @ A + y @ A.mT)",
        "test_ied_gradients.py::test_for_nonsymmetric_matrices_ift_is_exact_and_ddn_is_not",
    ),
    Bug(
        "vmap over a start of fewer dimensions",
        "runtime/opaque.py",
        "missing = rank - (x.dim() - own - 1)",
        "missing = 0",
        "test_ied_traps.py::test_mapping_over_a_start",
    ),
]

OPERATOR = [
    Bug(
        "operator: inside the span with the wrong sign",
        "gradients/by_products.py",
        "half = turn_inside(unit * v, y / unit) / torch",
        "half = -turn_inside(unit * v, y / unit) / torch",
        SPAN,
    ),
    Bug(
        "operator: inside the span left out",
        "gradients/by_products.py",
        "z = z + torch.bmm(torch.where(apart, half, 0), y)",
        "z = z + 0 * torch.bmm(torch.where(apart, half, 0), y)",
        SPAN,
    ),
    Bug(
        "operator: equal eigenvalues by the size of the wanted ones",
        "gradients/by_products.py",
        "differences(values, seen.scale[:, None, None])",
        "differences(values, values.abs().amax(-1)[:, None, None])",
        "test_krylov.py::test_eigenvalues_closer_than_rounding_of_the_largest_count_as_one",
    ),
    Bug(
        "operator: gradient of a matrix that is not symmetric",
        "gradients/by_products.py",
        "    if not seen.A.symmetric:",
        "    if False:",
        "test_operators.py::test_ied_equals_that_of_the_matrix",
    ),
    Bug(
        "operator: nonsymmetric gradient of the value without its right-hand side",
        "gradients/by_products.py",
        "right = right + d_values.unsqueeze(-1) * seen.transposed(y)",
        "right = right + 0",
        "test_krylov.py::test_every_nonsymmetric_family_equals_the_dense_solve",
    ),
    Bug(
        "operator: eigenvalue gradients in the units of the search",
        "gradients/by_products.py",
        "seen.back(d_values.reshape(values.shape))",
        "d_values.reshape(values.shape)",
        "test_krylov.py::test_gradients_of_values_have_no_unit",
    ),
    Bug(
        "operator: a gradient that is not solved for raises no warning",
        "solution.py",
        "        if converged.all():\n            return",
        "        if converged is not None:\n            return",
        f"{HONEST}::test_a_backward_that_ends_early_says_so",
    ),
    Bug(
        "operator: a gradient of what did not converge raises no warning",
        "solution.py",
        "if not doubtful.any():",
        "if doubtful is not None:",
        "test_less_products.py::test_what_is_not_solved_says_so_forward_and_backward",
    ),
    Bug(
        "a nonsymmetric warm start has no guard",
        "solvers/krylov.py",
        "guards = 1 if init is not None and k < n else 0",
        "guards = 1 if init is not None and k < n and symmetric else 0",
        f"{OVERTAKEN} {WARM}::test_so_is_one_among_complex_eigenvalues",
    ),
    Bug(
        "a symmetric warm start has no guard",
        "solvers/krylov.py",
        "guards = 1 if init is not None and k < n else 0",
        "guards = 1 if init is not None and k < n and not symmetric else 0",
        f"{WARM}::test_an_eigenvector_that_is_not_the_top_one_is_left_again",
    ),
    Bug(
        "a guard starts where the given vector is",
        "solvers/krylov.py",
        "return torch.cat([given, rows[:, p:]], -2)",
        "return torch.cat([given, given[:, : rows.shape[1] - k]], -2)",
        OVERTAKEN,
    ),
    Bug(
        "a guard is let go of after its first look",
        "krylov/search.py",
        "behind = inside.growth * (space.products - 0.5) >= needed",
        "behind = inside.growth * (space.products - 0.5) >= 0 * needed",
        OVERTAKEN,
    ),
    Bug(
        "growth of complex eigenvalues as if they were real",
        "krylov/tasks.py",
        "others.imag.abs().amax(-1, keepdim=True)",
        "0 * others.imag.abs().amax(-1, keepdim=True)",
        f"{WARM}::test_so_is_one_among_complex_eigenvalues",
        argued="The ellipse is widened until all eigenvalues are in it, so that a flat one ends up "
        "far too large, and the guard is followed longer than it has to be",
    ),
    Bug(
        "a tie of moduli converges",
        "solvers/krylov.py",
        "converged = converged & ~tie",
        "converged = converged | tie",
        f"{HONEST}::test_two_with_one_modulus_are_not_called_dominant",
    ),
    Bug(
        "of two with one modulus the negative one is favoured",
        "krylov/tasks.py",
        "(theta.real > 0.5 * moduli)",
        "(theta.real < -0.5 * moduli)",
        f"{HONEST}::test_two_with_one_modulus_are_not_called_dominant "
        "test_krylov.py::test_every_nonsymmetric_family_equals_the_dense_solve",
    ),
    Bug(
        "gap of a search as if one vector had been asked for",
        "krylov/tasks.py",
        "gaps = theta.diff(dim=-1).flip(-1)[:, first - 1 : k : self.copies]",
        "gaps = theta.diff(dim=-1).flip(-1)[:, first - 1 : first]",
        "test_ied_solution.py::test_the_gap_is_that_of_the_vectors_asked_for",
    ),
    Bug(
        "a space of which images are not made anew",
        "krylov/space.py",
        "        self._images[:, : self.width] = self.product(basis)\n",
        "",
        "test_krylov.py::test_many_restarts",
    ),
    Bug(
        "a space that keeps the wrong images",
        "krylov/space.py",
        "self._rows[:, :q], self._images[:, :q] = rows, images",
        "self._rows[:, :q] = rows",
        "test_krylov.py::test_many_restarts",
    ),
    Bug(
        "an invariant space goes on with rounding",
        "krylov/space.py",
        "block = self._replaced(block, self.length(block) <= ROUNDED * eps * self.reach, 0)",
        "block = self._replaced(block, self.length(block) < 0, 0)",
        "test_krylov.py::test_a_space_that_is_invariant_from_the_first_product_on",
    ),
    Bug(
        "conjugate residuals that do not stay clear of y",
        "tangent/residuals.py",
        "        x = self.clear(x)\n        return self.clear(",
        "        return (",
        "test_krylov.py::test_every_regular_least_squares_family_has_the_dense_gradient",
    ),
    Bug(
        "a solution of no digits is called solved",
        "tangent/residuals.py",
        "(solved & known).all(-1)",
        "solved.all(-1)",
        "test_krylov.py::test_a_gradient_of_no_digits_says_so",
    ),
    Bug(
        "a solution with a large residual is called solved",
        "tangent/residuals.py",
        "(solved & known).all(-1)",
        "known.all(-1)",
        "test_krylov.py::TestHonesty",
    ),
    Bug(
        "gmres forgets the second orthogonalisation in its matrix",
        "tangent/general.py",
        "H[:, : j + 1, j] = (h + g).squeeze(1)",
        "H[:, : j + 1, j] = g.squeeze(1)",
        "test_krylov.py::test_every_nonsymmetric_family_equals_the_dense_solve",
    ),
    Bug(
        "systems at any scale without the unit of the right-hand side",
        "tangent/residuals.py",
        "short = power_of_two(right.abs().amax(-1, keepdim=True))",
        "short = torch.ones_like(right[..., :1])",
        "test_krylov.py::test_gradients_in_float32_at_any_scale",
    ),
    Bug(
        "long inner products summed from end to end",
        "linalg/products.py",
        "if n < _LONG:",
        "if n < 1 << 30:",
        "test_krylov.py::test_a_million_numbers_in_float32",
        argued="How a product of matrices sums up is the business of the library underneath; some "
        "of them sum in blocks of their own.",
    ),
    Bug(
        "a lopsided operator is taken for a symmetric one",
        "operators/rows.py",
        "return self if self.A.symmetric or not self._is_lopsided() else self.symmetric_part",
        "return self",
        SPAN,
    ),
    Bug(
        "a wrong transpose is not found out",
        "operators/rows.py",
        "if ranks.agreed(~apart, mesh):",
        "if not ranks.agreed(apart & ~apart, mesh):",
        "test_operator_contracts.py::test_a_wrong_transpose_is_found_out",
    ),
    Bug(
        "numbers come back in half of their unit",
        "operators/rows.py",
        "for part in (half, self.exponents - half):",
        "for part in (half, half):",
        "test_krylov.py::test_gradients_of_values_have_no_unit",
    ),
    Bug(
        "a second derivative of products is zero, not an error",
        "autograd/products.py",
        "last(_LAST, (x.detach(),), (), *given)[0]",
        "x",
        "test_operators.py::test_a_second_derivative_is_refused",
    ),
]

LESS_OPERATOR = [
    Bug(
        "a minimiser of no digits counts as the only one",
        "solvers/krylov_minimum.py",
        "rows.unique = posed.known(found)",
        "rows.unique = torch.ones_like(found.converged)",
        "test_less_products.py::"
        "test_a_space_that_is_everything_knows_no_more_than_the_square_of_the_matrix",
    ),
    Bug(
        "the bottom of the spectrum is not looked for",
        "solvers/krylov_minimum.py",
        "if not rows.agreed(lost | (found.converged & (gap >= 0) & posed.definite)):",
        "if False:",
        "test_krylov.py::test_a_bottom_that_b_does_not_show",
    ),
    Bug(
        "what the bottom shows is not used",
        "solvers/krylov_minimum.py",
        "missed = ~lost & (~found.converged | (gap < -tolerance * found.scale))",
        "missed = ~lost & ~found.converged",
        "test_krylov.py::test_a_bottom_that_b_does_not_show",
    ),
    Bug(
        "a bottom that was not found proves a minimum",
        "solvers/krylov_minimum.py",
        "proved = found.converged & (bottom.converged | clear | enough)",
        "proved = found.converged",
        "test_less_products.py::test_a_minimum_beside_a_bottom_that_was_not_found_is_not_proved",
    ),
    Bug(
        "wide matrices: minimisers that form a sphere are not solutions",
        "solvers/krylov_minimum.py",
        "return (error <= WORTH * found.curvature) | (any_will_do & (m < n))",
        "return error <= WORTH * found.curvature",
        "test_less_products.py::test_minimisers_that_form_a_sphere_converge "
        "test_less_products.py::test_a_start_beside_a_sphere_of_minimisers",
    ),
    Bug(
        "operator: gradient of A without the residual",
        "gradients/base.py",
        "return [-r, -along], [z, y]",
        "return [0 * r, -along], [z, y]",
        "test_krylov.py::test_every_regular_least_squares_family_has_the_dense_gradient",
    ),
    Bug(
        "operator: multipliers in the units of the search",
        "solvers/krylov_minimum.py",
        "multiplier=found.values.squeeze(-1) * unit,",
        "multiplier=found.values.squeeze(-1),",
        "test_less_hard_cases.py::test_multipliers_and_gaps_have_the_unit_of_squares",
    ),
    Bug(
        "a tie is not broken by the start that is given",
        "solvers/krylov_minimum.py",
        "torch.ones_like(g) if init is None else init.expand(*batch, n).reshape(g.shape)",
        "torch.ones_like(g)",
        "test_krylov.py::test_a_start_breaks_the_tie_of_two_minimisers",
    ),
    Bug(
        "entries: the residual of a gradient is not looked at",
        "solvers/krylov_minimum.py",
        "left, size = long_norm(aside(v - image)), long_norm(v)",
        "left, size = 0 * long_norm(aside(v - image)), long_norm(v)",
        "test_less_products.py::test_minimisers_that_form_a_circle_have_no_gradient_and_say_so",
    ),
    Bug(
        "entries: gradient without the projection of v",
        "solvers/krylov_minimum.py",
        "return x - y * (x * y).sum(-1, keepdim=True)",
        "return x",
        "test_less_products.py::test_so_are_their_gradients",
    ),
    Bug(
        "entries: computed whatever a dimension says",
        "solvers/krylov_minimum.py",
        "return few and solver.dimension is None",
        "return few",
        "test_less_products.py::test_what_is_not_solved_says_so_forward_and_backward",
    ),
]

LESS_RULES = [
    Bug(
        "range: multipliers with half of their exponent",
        "reductions/sphere.py",
        "2 * unit + excess,",
        "unit + excess,",
        "test_less_hard_cases.py",
    ),
    Bug(
        "range: a very long b keeps its length",
        "reductions/sphere.py",
        "excess = (length - unit - _span(A.dtype)).clamp_min(0)",
        "excess = 0 * (length - unit - _span(A.dtype)).clamp_min(0)",
        "test_range.py::test_any_radius test_less_solution.py::test_b_far_larger_or_smaller_than_A "
        "test_less_traps.py::test_a_denormal_matrix",
    ),
    Bug(
        "gradient of A without the residual",
        "gradients/minimum.py",
        "images = Images(self.residual(), matvec(A, z), None)",
        "images = Images(0 * self.residual(), matvec(A, z), None)",
        LESS_GRADIENTS,
    ),
    Bug(
        "gradient of A with the residual of the wrong sign",
        "gradients/minimum.py",
        "images = Images(self.residual(), matvec(A, z), None)",
        "images = Images(-self.residual(), matvec(A, z), None)",
        LESS_GRADIENTS,
    ),
    Bug(
        "a search by products leaves the digits of the gradient in AᵀA",
        "gradients/minimum.py",
        "A, shift, y, v = (widened(x) for x in (A, shift, y, v))",
        "A, shift, y, v = (x.clone() for x in (A, shift, y, v))",
        "test_less_products.py::"
        "test_the_gradient_of_a_dense_matrix_has_digits_that_its_square_does_not",
    ),
    Bug(
        "DDN: blocks without the residual",
        "gradients/minimum.py",
        "block.diagonal(dim1=-3, dim2=-1).add_(r.unsqueeze(-1))",
        "block.diagonal(dim1=-3, dim2=-1).add_(0 * r.unsqueeze(-1))",
        DDN_GRADIENTS,
    ),
    Bug(
        "gradients in an eigenbasis are not refined",
        "tangent/basis.py",
        "return z if product is None else z + solve(v - product(z))",
        "return z",
        f"test_less_conditioning.py {TALL}",
    ),
    Bug(
        "gradients with a factor are refined once",
        "tangent/factor.py",
        "_REFINEMENTS = 3",
        "_REFINEMENTS = 1",
        CHOLESKY,
        argued="What one step does not settle is solved from singular vectors, which takes longer "
        "and is as good.",
    ),
    Bug(
        "a factor that does not fit is relied on",
        "tangent/factor.py",
        "        if settled.all():\n",
        "        if True:\n",
        CHOLESKY,
    ),
    Bug(
        "factored solve mapped over right-hand sides gives them in the wrong order",
        "tangent/factor.py",
        "rows = v.movedim(axes[-1] or 0, -3)",
        "rows = v.movedim(axes[-1] or 0, -3).flip(-3)",
        "test_less_cholesky.py::test_transforms",
    ),
    Bug(
        "warm starts get a gradient",
        "recipe.py",
        "init = init.detach()",
        "init = init.clone()",
        "test_training.py::test_least_squares_from_step_to_step[2-None]",
    ),
    Bug(
        "references get a gradient",
        "layers/eigenvectors.py",
        'object.__setattr__(self, "reference", self.reference.detach())',
        'object.__setattr__(self, "reference", self.reference)',
        "test_training.py::test_eigenvectors_from_step_to_step[130-{}-reference]",
    ),
    Bug(
        "starts get a gradient",
        "recipe.py",
        "        init = init.detach()\n",
        "        pass\n",
        "test_training.py::test_eigenvectors_from_step_to_step[130-{}-init]",
    ),
    Bug(
        "certificate of the smallest from the largest",
        "certificate.py",
        "exact[..., n - width : n - skip] if problem.largest else exact[..., skip:width]",
        "exact[..., n - width : n - skip]",
        "test_ied_solution.py::test_a_certificate_tells_the_smallest_from_the_largest",
    ),
    Bug(
        "operators: smallest eigenvalues are the largest",
        "reductions/end.py",
        'return {**given, "A": -given["A"]}',
        "return given",
        "test_krylov.py::test_gradients_of_what_happens_inside_the_span",
    ),
]

PAIRS = [
    Bug(
        "pairs: vectors of unit length",
        "layers/pairs.py",
        "found._replace(value=rows, multiplier=values, converged",
        "found._replace(value=self.directions(rows), multiplier=values, converged",
        "test_pairs.py::test_values_and_vectors_are_those_of_scipy",
    ),
    Bug(
        "kernels around a decomposition: what hooks return is taken for what was kept",
        "executors/least_squares.py",
        "            if not same:\n",
        "            if False:\n",
        "test_saved.py::test_what_was_kept_in_more_digits_is_computed_again",
    ),
    Bug(
        "kernels around a decomposition: second derivatives of constants",
        "executors/least_squares.py",
        "        if may_compile(v, None):\n",
        "        if True:\n",
        "test_native_basis.py::test_gradients_are_central_differences",
    ),
    Bug(
        "kernels: a view of negatives is read without its sign",
        "native/__init__.py",
        "        and not x.is_neg()\n",
        "",
        "test_native.py::test_views_that_stand_for_their_negatives",
    ),
    Bug(
        "kernels: zeros without memory are read",
        "native/__init__.py",
        "        x = x.clone()\n    return x.resolve_conj()",
        "    return x.resolve_conj()",
        "test_saved.py::test_zeros_without_memory_are_zeros",
    ),
    Bug(
        "kernels: numbers of another dtype are read",
        "native/__init__.py",
        "x.dtype is dtype\n        and x.numel() == numbers",
        "x.numel() == numbers",
        "test_saved.py::test_the_gate_of_the_kernels",
    ),
    Bug(
        "kernels: a library that reads other structures is called",
        "native/__init__.py",
        'zip_longest(theirs, ours, fillvalue="other") if a != b]',
        'zip_longest(theirs, ours, fillvalue="other") if not a]',
        "test_native_build.py::TestStructures",
    ),
    Bug(
        "kernels: a set that the build does not hold is said to be missing in the processor",
        "native/__init__.py",
        '    if setting in sets.split(", "):\n',
        "    if True:\n",
        "test_native_build.py::test_a_build_of_one_set_says_what_it_holds",
    ),
    Bug(
        "kernels: memory is read beyond its end",
        "native/__init__.py",
        "x.dtype is dtype\n        and x.numel() == numbers",
        "x.dtype is dtype",
        "test_saved.py::test_the_gate_of_the_kernels",
    ),
    Bug(
        "saved tensors: what hooks have changed is taken for what was kept",
        "executors/base.py",
        "kept = kind(*held) if same else self.problem.kept_again(tensors, kind)",
        "kept = kind(*held)",
        "test_saved.py::test_what_was_kept_in_more_digits_is_computed_again",
    ),
    Bug(
        "saved tensors: other dtypes are not noticed",
        "runtime/saved.py",
        "[_form(x) for x in tensors] == forms:",
        "len(tensors) == len(forms):",
        "test_saved.py::test_what_hooks_return_is_converted_or_computed_again",
    ),
    Bug(
        "products: a gradient does not say what it depends on",
        "autograd/products.py",
        "last(_LAST, (x.detach(),), (), *given)[0]",
        "last(_LAST, (x.detach(),), (), x.detach().requires_grad_())[0]",
        "test_operators.py::test_a_second_derivative_is_refused",
    ),
    Bug(
        "sparse: torch forgets the second derivative",
        "operators/sparse.py",
        "values.register_hook(_once)",
        "pass",
        "test_operators.py::test_a_second_derivative_is_refused",
    ),
    Bug(
        "declared: nobody looks whether a problem is quadratic",
        "problem.py",
        "if bool((rest > allowed).any()):",
        "if False:",
        "test_declared.py::test_a_problem_that_is_not_quadratic_is_refused",
    ),
    Bug(
        "declared: nobody looks whether a curvature is symmetric",
        "problem.py",
        "if bool((turn > allowed).any()):",
        "if False:",
        "test_declared.py::test_a_curvature_that_is_not_symmetric_is_refused",
    ),
    Bug(
        "projector: complex vectors are not conjugated",
        "autograd/span.py",
        "(fixed @ fixed.mH,)",
        "(fixed @ fixed.mT,)",
        "test_projector.py::test_complex_vectors",
    ),
    Bug(
        "projector: second derivatives see the parts inside",
        "autograd/span.py",
        "if V.shape[-1] > 1 and plain(V) and",
        "if False and plain(V) and",
        "test_projector.py::test_derivatives_beyond_the_first_gradient",
    ),
    Bug(
        "forward mode: steps move the value",
        "autograd/forward_mode.py",
        "u = found.value + (moved - constant(moved))",
        "u = moved",
        "test_projector.py::test_forward_mode_keeps_the_value",
    ),
    Bug(
        "nonfinite: bad entries get values of others",
        "recipe.py",
        "fill = math.nan if",
        "fill = 0.0 if",
        "test_nonfinite.py::test_other_entries_are_solved",
    ),
    Bug(
        "ball: a rounded solution is taken for one inside",
        "gradients/constrained.py",
        "(multiplier > 0) | (sphere.reaches(y) & (gap != 0))",
        "sphere.reaches(y) & ((gap != 0) | (multiplier > 0))",
        "test_saved.py::test_what_hooks_return_is_converted_or_computed_again",
    ),
    Bug(
        "pairs: errors of the factor stay in the vectors",
        "layers/pairs.py",
        "            due = (away > 1).any(0)\n",
        "            due = (away > 1e12).any(0)\n",
        "test_fifty_digits.py::test_errors_are_those_of_rounding_the_inputs",
    ),
    Bug(
        "pairs: errors of the factor stay in the gradient",
        "layers/pairs.py",
        "            found = found + torch.where(due.unsqueeze(-1), step, 0)\n",
        "            found = found + 0 * step\n",
        "test_fifty_digits.py::test_errors_are_those_of_rounding_the_inputs",
    ),
    Bug(
        "pairs: a part of the gradient along its own vector",
        "layers/pairs.py",
        "return found - along @ y - z",
        "return found - z",
        "test_fifty_digits.py::test_errors_are_those_of_rounding_the_inputs",
    ),
    Bug(
        "pairs: rounding of large vectors in the gradient of small ones",
        "layers/pairs.py",
        "            near = near & pair.are_near(state.shift)\n",
        "",
        "test_fifty_digits.py::test_errors_are_those_of_rounding_the_inputs",
    ),
    Bug(
        "pairs: turns inside the span are not refined",
        "layers/pairs.py",
        "self.turned(rows, rest, dual, values, pair.are_near(values)) + across",
        "rows + across",
        "test_fifty_digits.py::test_all_eigenpairs_have_small_residuals",
    ),
    Bug(
        "pairs: vectors of near values are orthogonal by their residuals alone",
        "layers/pairs.py",
        "self.turned(rows, rest, dual, values, pair.are_near(values))",
        "self.turned(rows, rest, dual, values, pair.are_near(values) & False)",
        "test_orthonormal.py::test_graded_pairs_with_equal_eigenvalues",
    ),
    Bug(
        "pairs: nobody asks whether vectors are orthonormal",
        "layers/pairs.py",
        "found.converged & (pair.skewness(rows) <= LOOSE)",
        "found.converged",
        "test_orthonormal.py::test_vectors_that_are_not_orthonormal_have_not_converged",
    ),
    Bug(
        "pairs: rounding of requested values is relative to the largest of them",
        "layers/pairs.py",
        "        rounding = pair.roundings(y, values)\n",
        "        rounding = values.abs()\n",
        "test_orthonormal.py::test_gradients_of_vectors_of_a_repeated_eigenvalue_are_of_least_norm",
    ),
    Bug(
        "complex: the gradient comes in for one vector of a pair",
        "linalg/embedding.py",
        "return 0.5 * (y[..., ::2, :] - 1j * y[..., 1::2, :])",
        "return y[..., ::2, :].clone()",
        "test_orthonormal.py::test_gradients_of_projectors",
    ),
    Bug(
        "pairs: refined values do not take the place of those of the decomposition",
        "tangent/kept.py",
        "torch.cat([others, values.flip(-1)], -1)",
        "self.values",
        "test_fifty_digits.py::test_errors_are_those_of_rounding_the_inputs",
    ),
    Bug(
        "pairs: the gradient of a diagonal is half of what it is",
        "layers/pairs.py",
        "return dA, -(z * y).sum(-2, keepdim=True)",
        "return dA, -0.5 * (z * y).sum(-2, keepdim=True)",
        "test_pairs.py::test_first_and_second_derivatives",
    ),
    Bug(
        "pairs: M only shortens its own vector",
        "layers/pairs.py",
        "z = z if normal is None else z + 0.5 * normal @ y",
        "z = z if normal is None else z + 0.5 * normal.diagonal(dim1=-2, dim2=-1)[..., None] * y",
        "test_projector.py::test_density_matrices_of_pairs",
    ),
    Bug(
        "pairs: the part of M that the eigenvalue multiplies is left out",
        "layers/pairs.py",
        "        z = state.shift.unsqueeze(-1) * z\n",
        "        z = 0 * z\n",
        "test_pairs.py::test_first_and_second_derivatives",
    ),
    Bug(
        "pairs: units divide M, too",
        "layers/pairs.py",
        "    homogeneous: ClassVar[int | None] = 1  #",
        "    homogeneous: ClassVar[int | None] = 2  #",
        "test_pairs.py::test_entries_whose_squares_leave_the_range",
    ),
    Bug(
        "pairs: a metric is not checked",
        "layers/pairs.py",
        "        bad = (info != 0) | ~lower.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)",
        "        bad = info < 0",
        "test_pairs.py::test_errors",
    ),
    Bug(
        "pairs: the root of an operator gets half of its gradient",
        "operators/congruent.py",
        "zip(both, (image, other))",
        "zip(both, (image, 0 * other))",
        "test_pairs.py::test_gradients_of_operators_are_those_of_their_entries",
    ),
    Bug(
        "rounding inside the span is divided by a gap",
        "gradients/eigenvectors.py",
        "return unit * torch.where(turn.abs() <= noise_tolerance(v.dtype) * length, 0, turn)",
        "return unit * turn",
        "test_projector.py::test_nearly_repeated_eigenvalues",
    ),
    Bug(
        "inside the span: the normal part is taken out as a constant",
        "gradients/eigenvectors.py",
        "    v = v - normal @ y\n",
        "",
        IED_GRADIENTS,
    ),
    Bug(
        "of equal moduli rounding chooses",
        "linalg/sphere.py",
        "least = (1 - merge_tolerance(rows.dtype)) * modulus",
        "least = modulus",
        "test_references.py::test_of_equal_moduli_the_first_is_positive",
    ),
    Bug(
        "a component of zero has the sign of the solver",
        "linalg/sphere.py",
        "torch.where(known, chosen, (rows * both[:, 1]).sum(-1))",
        "chosen",
        "test_references.py::test_a_fixed_direction_decides_where_the_reference_is_orthogonal",
    ),
    Bug(
        "references of several vectors are not flipped with them",
        "layers/ied.py",
        "    steps.append(Sign(single, block, M is None, reference is not None))\n"
        "    steps.append(End(problem.skip, problem.flipped, single, lone, signed=True))\n",
        "    steps.append(End(problem.skip, problem.flipped, single, lone, signed=True))\n"
        "    steps.append(Sign(single, block, M is None, reference is not None))\n",
        "test_references.py::test_what_is_asked_for_is_positive",
    ),
    Bug(
        "gaps between skipped eigenvalues count",
        "krylov/tasks.py",
        "first = max(self.copies, self.skip)",
        "first = self.copies",
        "test_pairs.py::test_gaps_between_skipped_eigenvalues_do_not_count",
    ),
]

DEFLATED = [
    Bug(
        "deflated solve mapped over right-hand sides takes the wrong shifts",
        "tangent/complement.py",
        "shifts = shift.unsqueeze(-2).expand(*rows.shape[:-1]).flatten(-2)",
        "shifts = shift.repeat_interleave(rows.shape[-3], -1)",
        "test_ied_gradients.py::test_jacobians_by_iteration",
    ),
    Bug(
        "deflated solve does not stay clear of y",
        "tangent/residuals.py",
        "return self.clear(self.column * x - self.product(x) / self.unit)",
        "return self.column * x - self.product(x) / self.unit",
        ITERATION,
        argued="The direction is clear of y already, and y spans an invariant space; this removes "
        "rounding, of which the residual is cleared as well.",
    ),
    Bug(
        "deflated solve believes its recursive residual",
        "tangent/complement.py",
        "done = (norm(rest) <= 100 * ROUNDED * torch.finfo(w.dtype).eps * norm(right)).all(-1)",
        "done = (norm(rest) <= torch.inf).all(-1)",
        "test_ied_repeated.py::test_what_conjugate_residuals_do_not_solve_is_decomposed",
    ),
    Bug(
        "deflated solve: equal eigenvalues are told apart",
        "tangent/residuals.py",
        "flat = ~(slope > ROUNDED * eps * largest * system.square(rest, near))",
        "flat = ~(slope > 0 * largest * system.square(rest, near))",
        "test_ied_repeated.py::"
        "test_a_rounding_of_a_right_hand_side_along_an_equal_eigenvector_is_not_magnified",
    ),
    Bug(
        "deflated solve by decomposition: equal eigenvalues are told apart",
        "tangent/complement.py",
        "apart = rise.abs() > merge_tolerance(S.dtype) * scale",
        "apart = rise.abs() > 0 * scale",
        "test_ied_gradients.py::test_finite_through_a_repeated_requested_eigenvalue "
        "test_ied_sizes.py::test_equal_eigenvalues_are_still_found_equal",
    ),
    Bug(
        "deflated solve: rounding of the shift, not of the matrix",
        "tangent/complement.py",
        "scale = torch.maximum(shift.abs(), steepness).amax(-1)",
        "scale = shift.abs().amax(-1)",
        "test_ied_repeated.py::"
        "test_a_rounding_of_a_right_hand_side_along_an_equal_eigenvector_is_not_magnified",
    ),
    Bug(
        "series ends after its first guess",
        "tangent/series.py",
        "if worst <= target:",
        "if True:",
        "test_ied_small.py::test_the_series_goes_on_until_the_slowest_of_a_batch_has_converged",
    ),
    Bug(
        "series in units in which squares underflow",
        "tangent/series.py",
        "unit = torch.linalg.vector_norm(right, math.inf, -1, keepdim=True).clamp_min_(least)",
        "unit = torch.ones_like(right[..., :1])",
        "test_range.py::test_gradients_whose_squares_underflow",
    ),
    Bug(
        "series of a nonsymmetric matrix with the transpose",
        "tangent/general.py",
        "neumann(lambda w: torch.bmm(w, matrix), values, right, rate)",
        "neumann(lambda w: torch.bmm(w, matrix.mT), values, right, rate)",
        "test_ied_gradients.py::test_a_dominant_eigenvalue_is_solved_by_a_series",
    ),
    Bug(
        "series of a nonsymmetric matrix forgets that y is part of the left eigenvector",
        "tangent/general.py",
        "left = d_values.reshape(-1, 1, 1) * (y + found[:, -1:])",
        "left = d_values.reshape(-1, 1, 1) * found[:, -1:]",
        "test_ied_gradients.py::test_nonsymmetric_matches_differences_of_eig",
    ),
]

FORWARD = [
    Bug(
        "forward mode: two Newton steps, not four",
        "autograd/forward_mode.py",
        "STEPS = 4",
        "STEPS = 2",
        "test_forward.py",
    ),
    Bug(
        "forward mode: three Newton steps, not four",
        "autograd/forward_mode.py",
        "STEPS = 4",
        "STEPS = 3",
        "test_forward.py",
    ),
    Bug(
        "forward mode: a gap that is not that of the solution",
        "problem.py",
        "found.multiplier + (helper.gap - helper.multiplier)",
        "helper.gap",
        "test_forward.py",
    ),
    Bug(
        "forward mode: equal eigenvalues are told apart",
        "gradients/eigenvectors.py",
        "apart = rise.abs() > merge_tolerance(A.dtype) * scale",
        "apart = rise.abs() > 0 * scale",
        "test_forward.py",
    ),
    Bug(
        "forward mode: singular entries are not replaced",
        "gradients/eigenvectors.py",
        "matrix = torch.where(singular[..., None, None], eye, matrix)",
        "",
        "test_ied_repeated.py::test_nilpotent",
    ),
]

LINALG = [
    Bug(
        "power of two of the largest number is infinite",
        "linalg/roundings.py",
        "positive.log2().floor().clamp_max(largest)",
        "positive.log2().floor()",
        "test_range.py::test_one_entry_at_the_largest_number test_range.py::test_after_nan_to_num",
    ),
    Bug(
        "symmetric part by interpolation",
        "linalg/products.py",
        "return 0.5 * (A + A.mH)",
        "return torch.lerp(A, A.mT, 0.5)",
        "test_range.py::test_the_symmetric_part_of_large_skew_entries "
        "test_range.py::test_symmetric_part_of_opposite_numbers_does_not_overflow",
    ),
    Bug(
        "sums of outer products over a shared matrix take the first of a batch",
        "linalg/products.py",
        "return (left @ right).sum_to_size(shape)",
        "return (left @ right)[(0,) * (left.dim() - len(shape))].expand(shape)",
        "test_less_gradients.py::test_derivatives_of_a_batch",
    ),
    Bug(
        "the number of threads is not restored",
        "runtime/threads.py",
        "            torch.set_num_threads(self.threads)",
        "            pass",
        "test_surroundings.py::test_the_number_of_threads_is_left_alone",
    ),
    Bug(
        "kernels: the largest eigenpair stands for the smallest",
        "native/__init__.py",
        "        1.0 if largest else -1.0,\n        second,",
        "        1.0,\n        second,",
        "test_native.py::test_equal_and_nearly_equal_eigenvalues_at_any_scale "
        "test_native_pairs.py::test_eigenpairs_and_gradients[7-torch.float64-smallest]",
    ),
    Bug(
        "kernels: the gradient of the smallest is that of the largest",
        "native/__init__.py",
        "math.prod(batch), 1.0 if largest else -1.0\n",
        "math.prod(batch), 1.0\n",
        "test_native.py::test_eigenpairs_and_gradients[goe-13-torch.float64-smallest]",
    ),
    Bug(
        "kernels: the wrong gradient of a pair is left out",
        "native/__init__.py",
        "if need else None for need in needs)\n    where = 0, 0,",
        "if need else None for need in needs[::-1])\n    where = 0, 0,",
        "test_native_pairs.py::test_the_same_as_by_the_common_path",
    ),
    Bug(
        "kernels: a pair that fails is returned",
        "native/__init__.py",
        "return Pairs(values, vectors, failed), kept",
        "return Pairs(values, vectors, None), kept",
        "test_native_pairs.py::test_one_bad_entry_is_named",
    ),
    Bug(
        "kernels: pivots of M that are rounding count",
        "native/__init__.py",
        "k, largest, n * torch.finfo(dtype).eps)",
        "k, largest)",
        "test_native_pairs.py::"
        "test_a_metric_that_is_singular_up_to_rounding_is_left_to_the_common_path",
    ),
    Bug(
        "kernels: conjugates are taken for numbers",
        "native/__init__.py",
        "        and not x.is_conj()\n",
        "",
        "test_native_complex.py::test_conjugate_transposed_and_strided_inputs",
    ),
    Bug(
        "kernels: a complex matrix is transposed",
        "native/__init__.py",
        "if A.is_complex() or A.is_neg() or A.is_contiguous():",
        "if A.is_neg() or A.is_contiguous():",
        "test_native_complex.py::test_conjugate_transposed_and_strided_inputs",
    ),
    Bug(
        "kernels: gradients that stand for their conjugates are taken for numbers",
        "native/__init__.py",
        "return x.resolve_conj().resolve_neg().contiguous()",
        "return x.resolve_neg().contiguous()",
        "test_native_complex.py::test_gradients_that_stand_for_their_conjugates",
    ),
    Bug(
        "kernels: second derivatives of several complex vectors from one of each pair",
        "layers/eigenvectors.py",
        "shift = given.state.shift.repeat_interleave(2, -1)",
        "shift = torch.cat([given.state.shift, given.state.shift], -1)",
        "test_native_complex.py::test_the_same_as_by_the_embedding",
    ),
    Bug(
        "kernels: second derivatives of the smallest of a pair are those of the largest",
        "layers/pairs.py",
        "        if not self.largest:  # the largest of −A\n            tensors",
        "        if False:\n            tensors",
        "test_native_pairs.py::test_the_same_as_by_the_common_path",
    ),
    Bug(
        "kernels: second derivatives of complex pairs in another order",
        "layers/eigenvectors.py",
        "v = torch.stack([v, torch.zeros_like(v)], -2).flatten(-3, -2)",
        "v = torch.cat([v, torch.zeros_like(v)], -2)",
        "test_native_pairs.py::test_the_same_as_by_the_common_path",
    ),
    Bug(
        "kernels: entries that fail are not decomposed",
        "solvers/reduction.py",
        "            rows[failed] = vectors[..., -count:].flip(-1).mT",
        "            pass",
        "test_native.py::test_one_bad_entry_is_named_and_others_are_not_lost",
    ),
    Bug(
        "kernels: a gradient that fails is returned",
        "autograd/eager.py",
        "                whole[failed] = part",
        "                pass",
        "test_native_pairs.py::test_gradients_in_which_the_kernels_fail_take_the_common_path_alone",
    ),
    Bug(
        "kernels: a vector that fails is returned",
        "executors/eigenvectors.py",
        ".index_put((good,), part).index_put((failed,), other)",
        ".index_put((good,), part)",
        "test_native_pairs.py::"
        "test_vectors_that_the_kernels_do_not_find_take_the_common_path_alone",
    ),
    Bug(
        "recipes: the signature does not know the dtype",
        "recipe.py",
        "_named(Form, (x.shape, x.dtype, diagonal))",
        "_named(Form, (x.shape, None, diagonal))",
        "test_recipe.py::test_short_dtypes_are_computed_in_float32",
    ),
    Bug(
        "recipes: True is one",
        "recipe.py",
        "maxsize=1024, typed=True",
        "maxsize=1024",
        "test_recipe.py::test_the_cache_holds_no_tensor_and_knows_true_from_one",
    ),
    Bug(
        "recipes: vectors are not put into the other order",
        "reductions/end.py",
        "return (*[x[..., self.skip :].flip(-1) for x in found],)",
        "return tuple(x[..., self.skip :] for x in found)",
        "test_order.py test_ied_solution.py::test_order_and_its_gradient_flip_together",
    ),
    Bug(
        "recipes: the radius does not divide b",
        "reductions/sphere.py",
        '"b": b if self.radius == 1 else b / self.radius}',
        '"b": b}',
        "test_recipe.py::test_least_squares_on_a_sphere_of_any_radius",
    ),
    Bug(
        "less: kernels forget the start",
        "executors/least_squares.py",
        'tensors.get("init") is not None and not bool(gap.all())',
        "False",
        "test_native.py::test_a_start_chooses_among_several_minimisers",
    ),
    Bug(
        "less: kernels take a ball for a sphere",
        "layers/less.py",
        "plain = not posed.has_options",
        "plain = True",
        "test_native_basis.py::test_what_torch_finds",
    ),
    Bug(
        "less: kernels read float64 as float32",
        "layers/less.py",
        "plain and dtype == torch.float32 and ",
        "plain and ",
        "test_native.py::TestShortCallOfLeastSquares",
    ),
    Bug(
        "less: kernels take one b for many matrices",
        "layers/less.py",
        "A.numel() == 0 or A.shape[:-1] != posed.b.shape:",
        "A.numel() == 0:",
        "test_native.py::TestShortCallOfLeastSquares",
    ),
    Bug(
        "less: a reduction is kept that nobody asks for",
        "executors/least_squares.py",
        "native.least_squares(A, b, recorded)",
        "native.least_squares(A, b, True)",
        "test_native.py::test_no_reduction_of_least_squares_is_kept_without_a_graph",
    ),
    Bug(
        "kernels: what is kept of all entries is taken for that of some",
        "executors/eigenvectors.py",
        "held = tuple(x[good] for x in held)",
        "pass",
        "test_native_pairs.py::"
        "test_vectors_that_the_kernels_do_not_find_take_the_common_path_alone",
    ),
    Bug(
        "kernels: second derivatives of least squares in units of their own",
        "layers/least_squares.py",
        "            shift = times_power(shift, -exponents)",
        "            pass",
        "test_native.py::test_second_derivatives",
    ),
    Bug(
        "kernels: the smallest is differentiated as the largest, to be differentiated again",
        "layers/eigenvectors.py",
        "            A, state = -A, state._replace(shift=-state.shift)",
        "            state = state._replace(shift=-state.shift)",
        "test_ied_small.py::test_first_and_second_derivatives "
        "test_ied_gradients.py::test_first_and_second_derivatives",
    ),
    Bug(
        "settled on the sphere in float32",
        "linalg/sphere.py",
        "return project(widened(u)).to(u.dtype)",
        "return project(u)",
        "test_less_solution.py::test_settled_on_the_sphere_up_to_half_a_rounding",
    ),
    Bug(
        "ties are broken by all ones alone",
        "linalg/sphere.py",
        "return torch.ones_like(second), second",
        "return torch.ones_like(second), torch.ones_like(second)",
        "test_less_solution.py::TestTies",
    ),
]

SOLVERS = [
    Bug(
        "dominant: six tenths of the norm count as more than half",
        "krylov/power.py",
        "_SHARE = 0.74",
        "_SHARE = 0.6",
        "test_ied_adaptive.py",
    ),
    Bug(
        "dominant: a share that is lost on the way",
        "krylov/power.py",
        "if not (symmetric or positive or _has_most(value, size, symmetric)):",
        "if False:",
        "test_ied_adaptive.py::test_a_share_that_is_lost_on_the_way_proves_nothing",
    ),
    Bug(
        "dominant: vectors of two signs prove something",
        "krylov/power.py",
        "    if not (y.amin(-1) * y.amax(-1) > 0).all():\n        return False\n",
        "",
        "test_ied_adaptive.py::test_a_vector_of_two_signs_proves_nothing_about_a_positive_matrix",
    ),
    Bug(
        "dominant: no test by Collatz and Wielandt",
        "krylov/power.py",
        "return bool((above <= y.shape[-1] * tolerance * value).all())",
        "return True",
        "test_ied_traps.py::test_blocks_of_a_positive_matrix_that_are_hardly_coupled",
    ),
    Bug(
        "adaptive: a certificate that does not exist is not looked at",
        "solvers/adaptive.py",
        "good = exists & (found.residual <= tolerance)",
        "good = found.residual <= tolerance",
        "test_ied_adaptive.py::test_a_krylov_space_that_has_all_digits_without_the_answer_in_it",
    ),
    Bug(
        "adaptive: what is not polished is accepted",
        "solvers/adaptive.py",
        "good = exists & (found.residual <= tolerance)",
        "good = exists",
        "test_ied_adaptive.py::test_a_batch_of_which_one_has_to_be_decomposed "
        "test_ied_adaptive.py::test_a_report_says_how_it_was_found",
    ),
    Bug(
        "adaptive: nothing is polished",
        "solvers/adaptive.py",
        "found = polish(part, found._replace(found=exists), factor, tolerance)",
        "found = found._replace(found=exists)",
        "test_ied_adaptive.py::test_each_way_agrees_with_the_decomposition",
    ),
    Bug(
        "adaptive: factors of what was decomposed are those of the search",
        "solvers/adaptive.py",
        "factor[bad] = torch.where(exists[:, None, None], again, torch.nan)",
        "pass",
        "test_ied_adaptive.py::test_a_batch_of_which_one_has_to_be_decomposed",
        argued="The backward pass measures the residual of what it has solved with a factor, and "
        "decomposes the matrix where that is too large: another factor costs time alone.",
    ),
    Bug(
        "polishing goes the wrong way",
        "krylov/proved.py",
        "y = found.rows + step\n",
        "y = found.rows - step\n",
        "test_ied_adaptive.py::test_each_way_agrees_with_the_decomposition",
    ),
    Bug(
        "certificate at the first value, not the last",
        "krylov/proved.py",
        "shift = values[:, -1] - merge_tolerance(y.dtype) * scale",
        "shift = values[:, 0] - merge_tolerance(y.dtype) * scale",
        "test_ied_adaptive.py::test_what_the_certificate_of_the_first_vectors_says",
    ),
    Bug(
        "first glance at symmetry is believed",
        "linalg/symmetric_part.py",
        "return image.add_(right_product(self.matrix, x)).mul_(0.5) if self.one_sided else image",
        "return image",
        "test_ied_adaptive.py::test_an_antisymmetric_part_that_the_first_glance_misses",
    ),
    Bug(
        "gap over all eigenvalues, not those asked for",
        "solvers/report.py",
        "return steps[..., max(0, skip - 1) : min(k, n - 1)].amin(-1)",
        "return steps.amin(-1)",
        "test_ied_solution.py test_ied_adaptive.py::test_a_report_says_how_it_was_found",
    ),
    Bug(
        "gap between those asked for, without the next",
        "solvers/report.py",
        "return steps[..., max(0, skip - 1) : min(k, n - 1)].amin(-1)",
        "return steps[..., : max(1, min(k, n - 1) - 1)].amin(-1)",
        "test_ied_solution.py test_ied_traps.py",
    ),
    Bug(
        "a start has no random part",
        "solvers/report.py",
        "given = given + torch.finfo(A.dtype).eps ** 0.5 * block[..., :count]",
        "given = given + 0 * block[..., :count]",
        "test_ied_traps.py::test_a_start_at_the_wrong_eigenvector_does_not_stay_there",
    ),
    Bug(
        "an iteration that stopped anywhere has converged",
        "solvers/report.py",
        "settled = finished & (residual <= max(SETTLED * eps, 16 * tolerance))",
        "settled = finished",
        "test_ied_solution.py::"
        "test_a_dominant_eigenvalue_that_is_not_real_and_simple_is_reported "
        "test_ied_traps.py::test_plus_and_minus_the_same_modulus_is_not_converged",
    ),
    Bug(
        "traces: the record of a call shares memory with its operands",
        "autograd/traced.py",
        "x.detach().clone().requires_grad_() if needed",
        "x.detach().requires_grad_() if needed",
        "test_traces.py::test_memory_may_be_used_again_after_the_solve",
    ),
    Bug(
        "traces: the derivative solves again",
        "autograd/traced.py",
        "seen.record = _Record(leaves, found)",
        "seen.record = None if recorded is self.recorded else _Record(leaves, found)",
        "test_traces.py::test_the_derivative_uses_the_record_of_the_solve",
    ),
    Bug(
        "traces: torch leaves out what it leaves out around a compiled graph",
        "autograd/traced.py",
        "self.keys = torch._C._ForceDispatchKeyGuard(included, _AUTOCAST)",
        "excluded = torch._C._dispatch_tls_local_exclude_set()\n"
        "        excluded = excluded.remove(DispatchKey.AutogradFunctionality)\n"
        "        self.keys = torch._C._ForceDispatchKeyGuard(included, excluded)",
        "test_traces.py::test_lazy_conjugates_inside_of_a_compiled_graph",
    ),
    Bug(
        "outputs of an operator share memory",
        "autograd/attach.py",
        "copies = [x.clone(memory_format=torch.contiguous_format) for x in outcome.tensors]",
        "copies = [x.contiguous() for x in outcome.tensors]",
        "test_transforms.py::test_outputs_of_an_operator_are_its_own",
    ),
    Bug(
        "a class that is defined again takes the name of the first",
        "runtime/text.py",
        'cls.kind = f"{name}@{version + 1}" if version else name',
        "cls.kind = name",
        "test_surroundings.py::test_the_first_class_is_still_itself",
    ),
    Bug(
        "infinite options cannot be read back",
        "runtime/text.py",
        'return "1e999" if self > 0 else "-1e999"',
        'return "inf"',
        "test_less_errors.py::test_a_solver_survives_as_text",
    ),
    Bug(
        "an entry that turns non-finite is finished",
        "linalg/loop.py",
        "finished = finished | (moving & done)",
        "finished = finished | done",
        "test_less_solution.py test_ied_traps.py::test_a_hopeless_entry_does_not_touch_the_others",
    ),
    Bug(
        "entries go on after they are done",
        "linalg/loop.py",
        "active = moving & ~done",
        "active = moving & ~(moving & done).all()",
        "test_less_solution.py::TestProjectedGradient",
    ),
    Bug(
        "power iteration of a nonsymmetric matrix from the left",
        "solvers/power_iteration.py",
        "(M if problem.symmetric else M.mT)",
        "M",
        "test_ied_solution.py::test_nonsymmetric_matches_eig",
    ),
    Bug(
        "power iteration is not shifted",
        "solvers/power_iteration.py",
        "return (least + _MARGIN * (high - low)).clamp_min(0)",
        "return 0 * least",
        "test_ied_solution.py::test_every_solver_where_gaps_are_kind",
    ),
    Bug(
        "Lanczos: no rows beyond those requested",
        "solvers/lanczos.py",
        "Largest(k, extra=self.extra)",
        "Largest(k)",
        "test_krylov.py::test_lanczos_is_the_search_with_blocks",
    ),
    Bug(
        "search: the residual of all rows of a block counts",
        "krylov/search.py",
        "residual = lengths[:, :wanted].amax(-1)",
        "residual = lengths.amax(-1)",
        "test_krylov.py::test_lanczos_is_the_search_with_blocks",
    ),
    Bug(
        "dense: gap of the smallest",
        "solvers/dense.py",
        "gap=gap_of(values.detach().flip(-1), problem) if report else unknown,",
        "gap=gap_of(values.detach(), problem).abs() if report else unknown,",
        "test_ied_solution.py test_ied_gradients.py::"
        "test_finite_through_a_repeated_requested_eigenvalue",
    ),
    Bug(
        "dense: a complex dominant eigenvalue converges",
        "solvers/dense.py",
        "converged=real & simple,",
        "converged=simple,",
        "test_ied_solution.py::test_a_dominant_eigenvalue_that_is_not_real_and_simple_is_reported",
    ),
    Bug(
        "secular: the gap stays in other units",
        "solvers/secular.py",
        "multiplier=(gap - floor) * unit * unit, gap=gap * unit * unit",
        "multiplier=(gap - floor) * unit * unit, gap=gap",
        "test_less_hard_cases.py",
    ),
    Bug(
        "secular: the spread stays in other units",
        "solvers/secular.py",
        "spread = spread * unit.square().unsqueeze(-1)",
        "spread = spread + 0",
        "test_less_hard_cases.py test_range.py::test_least_squares_at_any_scale",
    ),
    Bug(
        "secular: noise does not grow with b",
        "solvers/secular.py",
        "noise = NOISE * torch.finfo(c.dtype).eps * spectrum.top.sqrt() * norm(b)",
        "noise = NOISE * torch.finfo(c.dtype).eps * spectrum.top.sqrt() + 0 * norm(b)",
        "test_less_traps.py test_less_hard_cases.py",
    ),
    Bug(
        "secular: noise of singular vectors does not grow with b",
        "solvers/secular.py",
        "noise = NOISE * torch.finfo(c.dtype).eps * s[..., 0] * norm(b)",
        "noise = NOISE * torch.finfo(c.dtype).eps * s[..., 0] + 0 * norm(b)",
        "test_less_traps.py test_less_hard_cases.py",
    ),
    Bug(
        "secular: noise of promoted problems does not grow with b",
        "solvers/secular.py",
        "noise = NOISE * eps * spectrum.floor.sqrt() * norm(b)",
        "noise = NOISE * eps * spectrum.floor.sqrt() + 0 * norm(b)",
        "test_less_traps.py test_less_hard_cases.py",
    ),
    Bug(
        "secular: no singular vectors where the Gram matrix is too steep",
        "solvers/secular.py",
        "trusted = trusted & (amplification(spectrum, t, u) <= TOO_STEEP)",
        "trusted = trusted & (t >= 0)",
        "test_less_traps.py test_less_conditioning.py",
    ),
    Bug(
        "secular: a coefficient that is taken for zero is trusted",
        "solvers/secular.py",
        "trusted = contracted & ~guessed",
        "trusted = contracted",
        "test_less_hard_cases.py::test_a_part_of_b_that_only_the_singular_vectors_show",
    ),
    Bug(
        "secular: one Newton step less than it takes",
        "linalg/secular.py",
        "moving = active & (following > t)",
        "moving = active & (following > t) & (iterations < 2)",
        "test_less_solution.py::test_certified",
    ),
    Bug(
        "secular: the hard case has no height",
        "linalg/secular.py",
        "u = u + height * _lowest_direction(spectrum, u, init)",
        "u = u + 0 * height * _lowest_direction(spectrum, u, init)",
        "test_less_solution.py::TestTies",
    ),
    Bug(
        "secular: nothing is refined",
        "solvers/secular.py",
        "better = (step < 0.5) & (trial_residual <= residual.clamp_min(NOISE * eps))",
        "better = step < 0",
        "test_less_hard_cases.py::test_one_decomposition_is_enough_for_ordinary_matrices",
    ),
    Bug(
        "cholesky: a steep factor is relied on",
        "solvers/factored_newton.py",
        "return factor, (info == 0) & (pivot.square() * TOO_STEEP >= top)",
        "return factor, info == 0",
        CHOLESKY,
    ),
    Bug(
        "cholesky: positive curvature is not asked for",
        "solvers/factored_newton.py",
        "sure = (curvature > noise) & (nu.abs() <= noise)",
        "sure = nu.abs() <= noise",
        CHOLESKY,
    ),
    Bug(
        "cholesky: a multiplier that still moves is final",
        "solvers/factored_newton.py",
        "sure = (curvature > noise) & (nu.abs() <= noise)",
        "sure = curvature > noise",
        CHOLESKY,
    ),
    Bug(
        "cholesky: a gap of few digits is reported",
        "solvers/cholesky.py",
        "converged=found.converged & clear",
        "converged=found.converged",
        CHOLESKY,
    ),
    Bug(
        "cholesky: large problems grow from b alone",
        "solvers/cholesky.py",
        "inside = length < 1 if n >= LARGE else",
        "inside = length < 0 if n >= LARGE else",
        LARGE_LESS,
    ),
    Bug(
        "cholesky: ties of data of float32 are decided in float64",
        "solvers/cholesky.py",
        "found = longer._by_factors(posed, gram, rmatvec(A, b), start, report, eps)",
        "found = longer._by_factors(posed, gram, rmatvec(A, b), start, report, eps**2)",
        "test_less_cholesky.py::test_a_large_hard_case_has_a_gap_of_zero",
    ),
    Bug(
        "newton: one step with a factor is enough",
        "solvers/factored_newton.py",
        "CLOSE, _SMALL, _AGAIN = 0.6, 0.75, 6",
        "CLOSE, _SMALL, _AGAIN = 0.6, 0.75, 0",
        LARGE_LESS,
    ),
    Bug(
        "newton: a negative curvature is a minimum",
        "solvers/factored_newton.py",
        "sure = sure | (doubtful & definite & (curvature >= -noise))",
        "sure = sure | (doubtful & definite)",
        "test_less_cholesky.py::test_the_wrong_side_of_the_smallest_eigenvector_is_left",
    ),
    Bug(
        "newton: the wrong side is not left",
        "solvers/factored_newton.py",
        "turned = doubtful & definite & (curvature < -noise)",
        "turned = doubtful & definite & (curvature > noise)",
        "test_less_cholesky.py::test_the_wrong_side_of_the_smallest_eigenvector_is_left",
    ),
    Bug(
        "newton: the curvature has the error of the factor",
        "solvers/factored_newton.py",
        "1 / (2 * inner - form) - border",
        "1 / inner - border",
        LARGE_LESS,
    ),
    Bug(
        "probes: one of them",
        "linalg/definite.py",
        "_PROBES, _CHANCE = 8, 1e-9",
        "_PROBES, _CHANCE = 1, 1e-1",
        "test_definite.py",
    ),
    Bug(
        "probes: without the factor on the left",
        "linalg/definite.py",
        "images = torch.linalg.solve_triangular(lower, product(rows).mT, upper=False).mT",
        "images = product(rows)",
        "test_definite.py",
    ),
    Bug(
        "space of two starts: no second start",
        "krylov/inside.py",
        "following = torch.stack([torch.where(given, start, first), second.expand(B, n)], 1)",
        "following = torch.stack([torch.where(given, start, first), start], 1)",
        LARGE_LESS,
    ),
    Bug(
        "space of two starts: the start does not break a tie",
        "krylov/inside.py",
        "toward = basis[:, 0] * _side(e, init).unsqueeze(-1)",
        "toward = basis[:, 0]",
        LARGE_LESS,
    ),
    Bug(
        "space of two starts: a tie is decided by rounding",
        "krylov/inside.py",
        "unsure = noise + angle.square() * lowest * norm(start)",
        "unsure = 0 * noise",
        LARGE_LESS,
    ),
    Bug(
        "Krylov space of an inverse without its second neighbour",
        "krylov/inverse.py",
        "image.addcmul_(beside[k - 2].unsqueeze(-1), space[:, k - 2], value=-1)",
        "pass",
        "test_less_cholesky.py::test_only_what_is_not_proved_is_handed_over",
    ),
    Bug(
        "line search: the forecast is not shrunk",
        "solvers/line_search.py",
        "forecast = self.alpha * length * dot(ray.direction, ray.direction)",
        "forecast = length * dot(ray.direction, ray.direction)",
        "test_less_solution.py::TestProjectedGradient",
    ),
    Bug(
        "projected gradient: unrolled steps of rounding",
        "solvers/projected_gradient.py",
        "move = torch.where(rounding.unsqueeze(-1), move.detach() + short, move)",
        "pass",
        "test_less_gradients.py::test_unrolling_survives_steps_of_rounding",
    ),
]

BUGS = [
    *SPECTRUM,
    *IED_RULES,
    *TANGENT,
    *LEAN,
    *ATTACH,
    *OPERATOR,
    *LESS_OPERATOR,
    *LESS_RULES,
    *PAIRS,
    *DEFLATED,
    *FORWARD,
    *LINALG,
    *SOLVERS,
    Bug(
        "multiplier: its gradient through the solution has the wrong sign",
        "gradients/minimum.py",
        "v = -moved if v is None else v - moved",
        "v = moved if v is None else v + moved",
        MULTIPLIER,
    ),
    Bug(
        "multiplier: its gradient in the inputs is left out",
        "gradients/minimum.py",
        "self.pullback(self.tangent_solve(v) + along, needs)",
        "self.pullback(self.tangent_solve(v), needs)",
        MULTIPLIER,
    ),
    Bug(
        "multiplier by products: its gradient in the inputs is left out",
        "gradients/by_products.py",
        "return y, z if along is None else z + along",
        "return y, z",
        MULTIPLIER + " test_declared.py::test_operators",
    ),
    Bug(
        "multiplier by products: its gradient through the solution is left out",
        "gradients/by_products.py",
        "v = v - curvature(along)",
        "v = v + 0",
        MULTIPLIER + " test_declared.py::test_operators",
    ),
    Bug(
        "declared: the system is that of another shift",
        "gradients/minimum.py",
        "curvature(z) + shift.unsqueeze(-1) * z",
        "curvature(z) - shift.unsqueeze(-1) * z",
        "test_declared.py",
    ),
    Bug(
        "declared: second derivatives without those of the curvature",
        "gradients/minimum.py",
        "return torch.func.vjp(curved, *tensors)[1](w), (w * z).sum(-1)",
        "return tuple(0 * x for x in tensors), (w * z).sum(-1)",
        "test_declared.py",
    ),
    Bug(
        "declared: every curvature is taken for positive",
        "solvers/krylov_minimum.py",
        "self.definite = has_form(problem, LeastSquares)",
        "self.definite = True",
        "test_declared.py",
    ),
    Bug(
        "declared: the smallest eigenvalue stays in the multiplier",
        "solvers/secular.py",
        "multiplier=(t - low).to(dtype)",
        "multiplier=t.to(dtype)",
        "test_declared.py",
    ),
    Bug(
        "declared: forward mode does not project",
        "problem.py",
        "return sphere.project(u + correct(sphere.tangent(u, force)))",
        "return u + correct(sphere.tangent(u, force))",
        "test_forward.py",
    ),
    Bug(
        "the second attempt starts from what the first made of its start",
        "reductions/units.py",
        "return x.to(torch.promote_types(x.dtype, unit.dtype)) if real else x",
        'return None if name == "init" else x',
        "test_range.py::test_a_start_outlives_a_change_of_units",
    ),
    Bug(
        "the size of the curvature is far too large",
        "solvers/base.py",
        "product = seen.gram",
        "product = lambda x: 1e9 * seen.gram(x)",
        "test_surroundings.py::test_what_a_solver_of_ones_own_has_not_said_is_found_out",
    ),
    Bug(
        "power steps keep twice the symmetric part",
        "krylov/power.py",
        "matrix=matrix.mul_(half)",
        "matrix=matrix.mul_(size)",
        "test_ied_small.py",
    ),
    Bug(
        "vmap: a shared matrix has a basis for every entry",
        "autograd/attach.py",
        "kind is not Basis or len(posed.basis_batch) == len(posed.batch_shape)",
        "True",
        "test_transforms.py::test_cell",
    ),
    Bug(
        "complex: phases are not differentiated",
        "reductions/phases.py",
        "    return (first.conj() / first.abs()).unsqueeze(-1)\n",
        "    first = first.detach()\n    return (first.conj() / first.abs()).unsqueeze(-1)\n",
        "test_complex.py",
    ),
    Bug(
        "complex: the incoming gradient turns the other way",
        "layers/eigenvectors.py",
        "v = real_rows(v + torch.complex(torch.zeros_like(turn), turn))",
        "v = real_rows(v - torch.complex(torch.zeros_like(turn), turn))",
        "test_native_complex.py::test_the_same_as_by_the_embedding",
    ),
    Bug(
        "complex: mixed pairs are taken as they are",
        "linalg/embedding.py",
        "    if mixed.any():\n",
        "    if False:\n",
        "test_complex.py",
    ),
    Bug(
        "complex: a smaller eigenvalue may take the place of a larger one",
        "linalg/embedding.py",
        "order = eigh(0.5 * (within + within.mH)).vectors.flip(-1)",
        "order = eigh(0.5 * (within + within.mH)).vectors",
        "test_complex.py",
    ),
    Bug(
        "complex pairs of operators: mixed vectors are orthogonal without M",
        "layers/pairs.py",
        "outcome.multiplier, dual)",
        "outcome.multiplier)",
        "test_complex_pairs_products.py::test_repeated_eigenvalues_have_orthonormal_vectors",
    ),
    Bug(
        "complex pairs of operators: the embedding has the wrong number of skipped vectors",
        "layers/ied.py",
        "bare = bare.changed(k=2 * k, skip=2 * problem.skip, copies=2)",
        "bare = bare.changed(k=2 * k, copies=2)",
        "test_complex_pairs_products.py::test_reports_certificates_and_scipy",
    ),
    Bug(
        "pairs on ranks: a whole matrix is sent for its diagonal",
        "operators/matrix.py",
        "if cuts_matrices(self.A):",
        "if False:",
        "test_distributed.py::test_a_pair_sends_vectors_and_no_matrix",
    ),
    Bug(
        "complex: the gap is that within a pair",
        "layers/ied.py",
        "bare = bare.changed(k=2 * k, skip=2 * problem.skip, copies=2)",
        "bare = bare.changed(k=2 * k, skip=2 * problem.skip)",
        "test_complex.py",
    ),
    Bug(
        "complex: a transpose without conjugation",
        "operators/low_rank.py",
        "return (rows @ self.left.mH) @ self.right.conj()",
        "return (rows @ self.left.mT) @ self.right",
        "test_complex.py",
    ),
    Bug(
        "complex: no second direction for a vector orthogonal to the reference",
        "reductions/phases.py",
        "second = (sphere.references(y.real)[1] * y).sum(-1)",
        "second = last.neg()",
        "test_complex.py",
    ),
]

FUNCTIONS = [
    Bug(
        "spectral: a certificate knows one choice of equal eigenvalues at the edge",
        "certificate.py",
        "    tied = tied & (tied & ~member).any(-1, keepdim=True)\n",
        "    tied = tied & False\n",
        "test_spectral_certificate.py::TestRepeated",
    ),
    Bug(
        "spectral: a certificate of the smallest eigenvalues compares with the largest",
        "certificate.py",
        "member = here >= n - k if largest else here < k",
        "member = here >= n - k",
        "test_spectral_certificate.py::test_what_is_wrong_and_in_which_respect",
    ),
    Bug(
        "spectral: a certificate does not see what is outside of the small space",
        "certificate.py",
        "(_length(turned).square() + beside**2).sqrt()",
        "_length(turned)",
        "test_spectral_certificate.py::test_what_lies_outside_of_the_small_space_counts",
    ),
    Bug(
        "spectral: a certificate trusts an operator to be symmetric",
        "layers/spectral_function.py",
        "        if not A.symmetric:\n            images",
        "        if False:\n            images",
        "test_spectral_certificate.py::test_the_symmetric_part_of_an_operator_is_meant",
    ),
    Bug(
        "spectral: the gap of the smallest eigenvalues is that of the largest",
        "layers/spectral_function.py",
        "[..., k - 1 if largest else n - k - 1]",
        "[..., k - 1]",
        "test_spectral_certificate.py::TestReport",
    ),
    Bug(
        "spectral: a quadrature is trusted where both rules miss something",
        "linalg/divided_differences.py",
        "same | (settled & agrees)",
        "same | settled",
        "test_spectral.py::TestDividedDifferences",
    ),
    Bug(
        "spectral: the quotient is taken for close points",
        "linalg/divided_differences.py",
        "same | (settled & agrees)",
        "same",
        "test_spectral.py::TestDividedDifferences",
    ),
    Bug(
        "spectral: the part between group and rest is not doubled",
        "linalg/matrix_function.py",
        "2 * outer @ others.mH",
        "outer @ others.mT",
        "test_spectral.py::TestDerivatives::test_first_and_second",
    ),
    Bug(
        "spectral: an infinite quotient between equal eigenvalues",
        "linalg/matrix_function.py",
        "apart = gap.abs() > self.rounding(values).unsqueeze(-1)",
        "apart = gap.abs() >= 0",
        "test_spectral.py::TestDerivatives::test_a_group_that_is_not_apart",
    ),
    Bug(
        "spectral: roots of rounding",
        "linalg/divided_differences.py",
        "torch.where(x < -rounding, torch.nan, 0)",
        "torch.where(x < -rounding, torch.nan, x.abs())",
        "test_spectral.py::TestDerivatives test_spectral.py::TestErrors",
    ),
    Bug(
        "spectral: gradients of parameters are constant in the matrix",
        "autograd/spectral.py",
        "if needs_slopes and torch.is_grad_enabled():",
        "if False:",
        "test_spectral.py::TestParameters",
    ),
    Bug(
        "spectral: a third derivative without the part of the parameters",
        "autograd/spectral.py",
        "torch.zeros_like(direction), _Last.apply(dA, A), None",
        "torch.zeros_like(direction), dA, None",
        "test_spectral.py::TestParameters",
    ),
    Bug(
        "spectral: forward mode is of the first order",
        "autograd/spectral.py",
        "transforms_around(A) + 1",
        "2",
        "test_spectral.py::TestDerivatives::test_forward_mode",
    ),
    Bug(
        "spectral: a trace of torch.func takes the Function",
        "layers/spectral.py",
        "if traced or forward_mode",
        "if forward_mode",
        "test_spectral.py::test_transforms_inside_a_trace",
    ),
    Bug(
        "spectral: autograd around a trace is not counted",
        "runtime/modes.py",
        "return max(count, 1) + 1",
        "return max(count, 1)",
        "test_spectral.py::test_autograd_around_a_transform_in_a_trace",
    ),
    Bug(
        "spectral: autograd outside of forward mode is not counted",
        "runtime/modes.py",
        "tangent is not None) + x.requires_grad",
        "tangent is not None)",
        "test_spectral.py::TestDerivatives::test_forward_mode_inside_reverse_mode",
    ),
]
BUGS += FUNCTIONS

POOL = "test_pool.py::test_solutions_are_those_of_svd"
POOLED = [
    Bug(
        "pool: the mean is not subtracted",
        "layers/pool.py",
        "X - mean.unsqueeze(-2) if self.centre else X",
        "X",
        f"{POOL}[7x4-channels-centre-None-dtype1-]",
    ),
    Bug(
        "pool: weights do not sum to one",
        "layers/pool.py",
        "return weights / one_if_zero(weights.sum(-1, keepdim=True))",
        "return weights",
        f"{POOL}[7x4-channels--None-dtype1-weights]",
    ),
    Bug(
        "pool: weights that are all zero are divided by their sum",
        "layers/pool.py",
        "weights / one_if_zero(weights.sum(-1, keepdim=True))",
        "weights / weights.sum(-1, keepdim=True)",
        "test_pool.py::test_no_extent_is_zero",
    ),
    Bug(
        "pool: vectors of tokens are not normalised",
        "layers/pool.py",
        "rows = rows / one_if_zero(norm(rows)).unsqueeze(-1)",
        "rows = rows / 1",
        f"{POOL}[4x7-tokens--None-dtype1-]",
    ),
    Bug(
        "pool: moments of tokens are not divided by their number",
        "layers/pool.py",
        "gram = _TIMES[precision.turn & 1](A, A.mT)\n        return gram / X.shape[-2] if",
        "gram = _TIMES[precision.turn & 1](A, A.mT)\n        return gram if",
        f"{POOL}[4x7-tokens--None-dtype1-]",
    ),
    Bug(
        "pool: weights with gradients take roots",
        "layers/pool.py",
        "(plain(w) and not recorded(w) and not forward_mode(w))",
        "plain(w)",
        "test_pool.py::test_weights_with_gradients_take_no_roots",
    ),
    Bug(
        "pool: the larger side",
        "layers/pool.py",
        "wide = tokens < channels and",
        "wide = tokens > channels and",
        "test_pool.py::test_the_path_is_that_of_the_smaller_side",
    ),
    Bug(
        "pool: large features form a matrix",
        "layers/pool.py",
        "_FORMED = 256",
        "_FORMED = 4096",
        "test_pool.py::test_the_path_is_that_of_the_smaller_side "
        "test_pool.py::test_nothing_of_the_size_of_the_channels_squared_is_formed",
    ),
    Bug(
        "pool: a direction without extent is a vector",
        "layers/pool.py",
        "zero = known <= rank_tolerance(known.dtype) * known[..., :1].clamp_min(0)",
        "zero = known < 0",
        "test_pool.py::test_no_extent_is_zero",
    ),
    Bug(
        "pool: rounding of the mean is an extent",
        "layers/pool.py",
        "zero = zero | (extents.detach() <= rounding.unsqueeze(-1))",
        "zero = zero | (extents.detach() < 0 * rounding.unsqueeze(-1))",
        "test_pool.py::test_no_extent_is_zero",
    ),
    Bug(
        "pool: extents in other units",
        "layers/pool.py",
        "extents = extents * unit.squeeze(-1)",
        "extents = extents * 1",
        "test_pool.py::test_scale",
    ),
    Bug(
        "pool: no unit for features of any size",
        "layers/pool.py",
        "return power_of_two(largest)",
        "return None",
        "test_pool.py::test_scale",
    ),
    Bug(
        "pool: rounding of the mean decides signs",
        "layers/pool.py",
        "mean.masked_fill(zero.unsqueeze(-1), 0)",
        "mean",
        "test_pool.py::test_signs_of_features_without_a_mean_are_not_those_of_rounding",
    ),
    Bug(
        "pool: signs without a reference",
        "layers/pool.py",
        "signs = _towards(rows, mean, extents)",
        "signs = sphere.signs(rows)",
        "test_pool.py::test_a_step_of_features_never_flips_signs_that_the_mean_decides "
        f"{POOL}[7x4-channels-centre-None-dtype1-]",
    ),
    Bug(
        "pool: maps are not transposed",
        "layers/pool.py",
        "return maps.flatten(-2).mT",
        "return maps.flatten(-2)",
        "test_pool.py::test_maps",
    ),
    Bug(
        "pool: autocast rounds the moments",
        "layers/pool.py",
        "with full_precision(X.device):",
        "if True:",
        "test_pool.py::test_autocast_does_not_round",
    ),
]
BUGS += POOLED
METRICS = "test_pairs_products.py::test_values_vectors_and_certificates"
METRIC_GRADIENTS = "test_pairs_products.py::test_gradients_are_those_of_dense_pairs"
INNER_PRODUCTS = [
    Bug(
        "pairs by products: M gets no gradient from the lengths of vectors",
        "gradients/by_products.py",
        "left = left + torch.bmm(0.25 * (inside + inside.mT), y)",
        "left = left + 0",
        METRIC_GRADIENTS,
    ),
    Bug(
        "pairs by products: M gets no gradient from the angles between vectors",
        "gradients/by_products.py",
        "torch.bmm(0.25 * (inside + inside.mT), y)",
        "0.5 * inside.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * y",
        METRIC_GRADIENTS,
    ),
    Bug(
        "pairs by products: the gradient of M has the wrong sign",
        "gradients/by_products.py",
        "_symmetric_pull(own, -left, y,",
        "_symmetric_pull(own, left, y,",
        METRIC_GRADIENTS,
    ),
    Bug(
        "pairs by products: the gradient is orthogonal without M",
        "tangent/residuals.py",
        "return torch.baddbmm(right, inner(right, self.y), self.dual, alpha=-1)",
        "return right",
        METRIC_GRADIENTS,
    ),
    Bug(
        "pairs by products: errors of solves add up in the backward pass",
        "tangent/residuals.py",
        "(~done & (left <= eps ** (1 / 3) * mark)).any()",
        "False",
        "test_pairs_products.py::test_batches",
    ),
    Bug(
        "pairs by products: a space keeps the wrong products with M",
        "krylov/space.py",
        "        self._duals[:, : self.width] = duals\n",
        "",
        "test_pairs_products.py::test_restarts_and_corrections",
    ),
    Bug(
        "pairs by products: a refreshed space has old products with M",
        "krylov/space.py",
        "        self._duals[:, : self.width] = self.metric.dual(self.rows)\n",
        "",
        "test_pairs_products.py::test_restarts_and_corrections " + METRICS,
        argued="The rows change by rounding alone, and so do their products.",
    ),
    Bug(
        "pairs by products: directions are not made orthogonal twice",
        "krylov/space.py",
        "    small = math.inf\n",
        "    small = 0\n",
        METRICS + " test_pairs_products.py::test_restarts_and_corrections",
    ),
    Bug(
        "pairs by products: corrections without the metric",
        "krylov/search.py",
        "                        metric=metric,\n",
        "",
        "test_pairs_products.py::test_restarts_and_corrections",
    ),
    Bug(
        "pairs by products: rounding of M does not count",
        "solvers/krylov.py",
        "tolerance = tolerance * metric.rounding",
        "tolerance = tolerance * 1.0",
        "test_pairs_products.py::test_an_ill_conditioned_metric",
    ),
    Bug(
        "pairs by products: the diagonal of M is not used",
        "tangent/metric.py",
        "return rest if self.diagonal is None else rest / self.diagonal",
        "return rest",
        "test_pairs_products.py::test_a_diagonal_saves_products",
    ),
    Bug(
        "pairs by products: negative curvature of M is not seen",
        "tangent/metric.py",
        "negative = moving & (curvature <= 0)",
        "negative = moving & (curvature < -torch.inf)",
        "test_pairs_products.py::TestErrors::test_an_indefinite_metric",
    ),
    Bug(
        "pairs by products: a negative length is not seen",
        "tangent/metric.py",
        "        negative = square < 0\n",
        "        negative = square < -torch.inf\n",
        "test_pairs_products.py::TestErrors::test_an_indefinite_metric_with_a_solve",
    ),
    Bug(
        "pairs by products: a solve is not checked",
        "operators/inner.py",
        "    if (apart <= worth).all():",
        "    if True:",
        "test_pairs_products.py::test_a_wrong_solve_says_so",
    ),
    Bug(
        "pairs by products: a solve is not used",
        "operators/matvec.py",
        "return self._solve is not None",
        "return False",
        "test_pairs_products.py::test_a_wrong_solve_says_so",
    ),
    Bug(
        "pairs by products: a multiple is solved as the matrix",
        "operators/base.py",
        "return self.part.solve(rows) / self.factor",
        "return self.part.solve(rows)",
        "test_pairs_products.py::test_multiples_of_a_diagonal_matrix_are_solved_as_they_are",
    ),
    Bug(
        "pairs by products: a certificate in the wrong inner product",
        "certificate.py",
        "stationarity=metric.length(metric.raised(rest), rest)",
        "stationarity=metric.length(rest, rest)",
        "test_pairs_products.py::test_certificates_see_what_is_wrong",
    ),
    Bug(
        "pairs by products: a certificate of unit vectors",
        "certificate.py",
        "feasibility=(y @ dual.mT - eye)",
        "feasibility=(y @ y.mT - eye)",
        "test_pairs_products.py::test_certificates_see_what_is_wrong",
    ),
    Bug(
        "pairs by products: a batch of M is that of A",
        "solvers/krylov.py",
        "    batch, n = problem.batch_shape, A.shape[-1]\n",
        "    batch, n = A.batch_shape, A.shape[-1]\n",
        "test_pairs_products.py::test_batches",
    ),
]
BUGS += INNER_PRODUCTS
COMPLEX_SINGULAR = [
    Bug(
        "complex singular: the second vector of a pair is not i times the first",
        "layers/singular_vectors.py",
        "pairs, values = paired_rows(complex_rows(rows)), values",
        "pairs, values = paired_rows(complex_rows(rows).conj()).conj(), values",
        "test_complex_singular.py::test_single_precision_is_double_precision_rounded",
    ),
    Bug(
        "complex singular: every second vector is taken of both kinds",
        "reductions/field.py",
        "complex_rows(rows[..., ::2, :])).mT",
        "complex_rows(rows[..., : rows.shape[-2] // 2, :])).mT",
        "test_complex_singular.py::test_solutions_are_those_of_svd",
    ),
    Bug(
        "complex singular: weights are not those of both rows",
        "reductions/field.py",
        '            posed["weights"] = weights.repeat_interleave(2, -1)',
        '            posed["weights"] = weights.repeat(*(1,) * (weights.dim() - 1), 2)',
        "test_complex_singular.py::test_solutions_are_those_of_svd",
    ),
    Bug(
        "complex singular: right vectors of svd are not conjugated",
        "linalg/singular.py",
        "return rows.conj(), padded(values, n)",
        "return rows, padded(values, n)",
        "test_complex_singular.py::test_solutions_are_those_of_svd",
    ),
    Bug(
        "complex singular: the gap is that of the copies",
        "solvers/singular.py",
        "gap_of(spectrum[..., ::copies], -(-problem.width // copies), problem.largest)",
        "gap_of(spectrum, problem.width, problem.largest)",
        "test_complex_singular.py::test_solutions_are_those_of_svd",
    ),
    Bug(
        "singular: numbers of float32 in other units count as those of float64",
        "layers/singular_vectors.py",
        "bare = bare.changed(single=problem.single or computed.to_real() == torch.float64)",
        "bare = bare.changed(single=problem.single)",
        "test_batches.py::test_triplets test_batches.py::test_null_spaces",
    ),
    Bug(
        "range: a b of zero is divided as if it had a size",
        "reductions/sphere.py",
        "excess = torch.where(largest > 0, excess, 0)",
        "excess = torch.where(largest > -1, excess, 0)",
        "test_batches.py::test_the_gradient_of_no_b_has_the_units_of_A",
    ),
    Bug(
        "pairs by products: the roundings of one M are those of all",
        "operators/inner.py",
        "metric.rounding = ratio.squeeze(-1).clamp_min(1)",
        "metric.rounding = ratio.amax().clamp_min(1).expand(len(ratio))",
        "test_batches.py::test_pairs_beside_an_ill_conditioned_metric",
    ),
    Bug(
        "isvd by products: left null vectors are rounding errors of images",
        "layers/triplets.py",
        "if not largest:",
        "if largest:",
        "test_triplets_products.py::test_left_null_vectors_by_products",
    ),
    Bug(
        "isvd by products: null vectors take the place of small triplets",
        "layers/triplets.py",
        "wrong = wrong & (error > sizes)",
        "wrong = wrong & (error > 0 * sizes)",
        "test_triplets_products.py::test_vectors_are_orthonormal_whatever_the_values_are",
    ),
    Bug(
        "isvd by products: the system of left vectors is divided by a small value",
        "gradients/triplets_by_products.py",
        "last = torch.where(small, column * solve(gram_of_rows, u, g_u), last)",
        "last = torch.where(small, 0 * solve(gram_of_rows, u, g_u), last)",
        "test_triplets_products.py::test_gradients_are_those_of_the_dense_matrix",
    ),
    Bug(
        "isvd by products: the part along (u, −v) is left out",
        "gradients/triplets_by_products.py",
        "return torch.bmm(same + opposite, u), torch.bmm(same - opposite, v)",
        "return torch.bmm(same, u), torch.bmm(same, v)",
        "test_triplets_products.py::test_gradients_are_those_of_the_dense_matrix",
    ),
    Bug(
        "the units of a transpose are squared",
        "operators/transposed.py",
        "images / one_if_zero(images.abs().amax(-1, True))",
        "images",
        "test_triplets_products.py::test_gradients_are_those_of_the_dense_matrix",
    ),
    Bug(
        "triplets: forward mode takes the tangents of what is zero for rounding",
        "gradients/triplets.py",
        "_PairSystem(largest, single, linear=True)",
        "_PairSystem(largest, single)",
        "test_forward.py::test_all_modes_agree_where_products_are_zero",
    ),
    Bug(
        "triplets: forward mode multiplies rounding by tangents of close values",
        "gradients/triplets.py",
        "u, v = halves(y + (moved - constant(moved)), m)",
        "u, v = halves(y + moved, m)",
        "test_projector.py::test_derivatives_of_the_product_of_both_sides",
    ),
    Bug(
        "triplets: second derivatives of close values without a word",
        "layers/triplets.py",
        "return again_of_triplets(found, given.state.shift)",
        "return found",
        "test_projector.py::test_derivatives_of_the_product_of_both_sides",
    ),
    Bug(
        "singular vectors: a shift that hooks have rounded is not that of the basis",
        "gradients/singular.py",
        "nearest(shift, basis.values)",
        "shift",
        "test_saved.py::test_what_hooks_return_is_converted_or_computed_again",
    ),
    Bug(
        "pairs: an infinite entry of a diagonal metric drops out",
        "layers/pairs.py",
        "bad = ~((d > 0) & d.isfinite()).all(-1)",
        "bad = ~(d > 0).all(-1)",
        "test_nonfinite.py::test_one_infinite_entry_of_a_metric",
    ),
    Bug(
        "complex singular: gradients of weights without a conjugate",
        "operators/gram.py",
        "torch.real(first.conj() * second)",
        "torch.real(first * second)",
        "test_complex_singular.py::test_weights_of_operators",
    ),
]
GROUPS = [
    Bug(
        "group: the part outside is not doubled",
        "autograd/spectral.py",
        "inner @ rows + 2 * z",
        "inner @ rows + z",
        "test_spectral.py::TestGroups::test_derivatives",
    ),
    Bug(
        "group: the sign of the smallest eigenvalues",
        "autograd/spectral.py",
        "z = sign * complement_solve(",
        "z = complement_solve(",
        "test_spectral.py::TestGroups::test_derivatives",
    ),
    Bug(
        "group: a second derivative is that of a constant",
        "autograd/spectral.py",
        "if torch.is_grad_enabled() or not plain(direction):",
        "if not plain(direction):",
        "test_spectral.py::TestGroups::test_derivatives",
    ),
    Bug(
        "group: batches of gradients go to the kernels",
        "runtime/modes.py",
        "and not is_grads_batch(x)",
        "and not x.is_nested",
        "test_spectral.py::TestGroups::test_gradients_in_batches",
    ),
    Bug(
        "group: rounding of zero is relative to the group",
        "layers/spectral.py",
        "if bool((values.abs() <= merge_tolerance(A.dtype) * size).any()):",
        "if bool((values.abs() <= 0 * size).any()):",
        "test_spectral.py::TestGroups::test_which_functions_need_all_eigenvalues",
    ),
    Bug(
        "group: parameters get no gradients",
        "layers/spectral.py",
        "if torch.is_grad_enabled() and recorded(known):",
        "if False:",
        "test_spectral.py::TestGroups::test_which_functions_need_all_eigenvalues",
    ),
    Bug(
        "group: a known decomposition of the smallest eigenvalues is that of the largest",
        "layers/spectral.py",
        "return (values, rows.mT) if posed.largest else (-values.flip(-1), rows.flip(-2).mT)",
        "return values, rows.mT",
        "test_spectral.py::TestGroups::test_a_decomposition_that_is_known",
    ),
    Bug(
        "group: zero of an operator is relative to the group",
        "layers/spectral.py",
        "MatrixFunction(scalar, None, largest, size=COARSER * size_of(A, rows))",
        "MatrixFunction(scalar, None, largest)",
        "test_spectral.py::TestProducts::test_rounding_of_zero_counts_as_zero",
    ),
]
BUGS += COMPLEX_SINGULAR + GROUPS
CASES = [
    Bug(
        "chains: a solver is not asked whether it serves",
        "recipe.py",
        "    require_rules(problem, solver, gradient)\n",
        "",
        "test_chains.py::test_errors_name_the_problem_of_the_user",
    ),
    Bug(
        "chains: a certificate is in the coordinates of the user",
        "solving.py",
        "        columns = step.forth(columns, before, after)\n",
        "        pass\n",
        "test_chains.py::test_a_chain_holds_no_tensor_and_leads_back",
    ),
    Bug(
        "pairs: the entries of M are formed though it has a solve",
        "layers/ied.py",
        "(M.solvable or problem.n > _FORMED)",
        "problem.n > _FORMED",
        "test_chains.py::test_a_problem_has_a_chain",
    ),
    Bug(
        "operators: a factor on one side of a symmetric part",
        "operators/coordinates.py",
        "self.coordinates, self.symmetric = coordinates, False",
        "self.coordinates = coordinates",
        "test_operators.py::test_a_factor_on_one_side_makes_an_operator_that_is_not_symmetric",
    ),
    Bug(
        "operators: another part changes the operator itself",
        "operators/base.py",
        "        other = copy(self)\n",
        "        other = self\n",
        "test_operators.py::test_an_operator_around_another_keeps_what_is_its_own",
    ),
]
BUGS += CASES
REPORTS = [
    Bug(
        "warnings: they point at the library",
        "runtime/caller.py",
        "while _is_inside(frame) and frame.f_back is not None:",
        "while False:",
        "test_warnings.py::test_a_forward_pass_points_at_its_call",
    ),
    Bug(
        "warnings: those of a compiled program point at what the compiler wrote",
        "runtime/caller.py",
        '_INSIDE = ("pmaf", "torch")',
        '_INSIDE = ("pmaf",)',
        "test_warnings.py::test_a_compiled_program_points_at_the_function",
    ),
    Bug(
        "reports: a search by products has no method",
        "recipe.py",
        "backward=ended.backward, method=ended.method)",
        "backward=ended.backward)",
        "test_reports.py::test_a_solution_says_how_it_was_found",
    ),
    Bug(
        "reports: other threads add their methods",
        "runtime/log.py",
        "_collected.get(get_ident(), []).append(way)",
        "next(iter(_collected.values())).append(way)",
        "test_reports.py::test_methods_of_other_threads_and_of_a_backward_pass_are_not_mixed_in",
    ),
    Bug(
        "trees: a problem that is put together forgets its leaves",
        "runtime/trees.py",
        "            object.__setattr__(x, _LEAVES, names)\n",
        "            pass\n",
        "test_reports.py::test_a_tree_is_taken_apart_and_put_together",
    ),
]
BUGS += REPORTS
CENTRED = [
    Bug(
        "centred: dense data are multiplied as they are",
        "operators/shifted.py",
        "if isinstance(self.part, Matrix) and not is_spread(self.part.A):",
        "if False:",
        "test_centred.py::test_they_are_those_of_the_singular_vectors_of_centred_data",
    ),
    Bug(
        "centred: gradients of data that are not",
        "operators/gram.py",
        "images, count = self._images(both), len(self.part.tensors)",
        "images, count = self.part.matvec(both), len(self.part.tensors)",
        "test_centred.py::test_gradients_of_data_against_differences",
    ),
    Bug(
        "products: what the operator has no batch for is put back in another order",
        "operators/broadcasting.py",
        "(order.index(i) for i in dims)",
        "order",
        "test_operators.py::test_a_batch_of_one_broadcasts_too",
    ),
]
BUGS += CENTRED

SURFACE = [
    Bug(
        "modes: a decorator that imports the compiler",
        "runtime/modes.py",
        "    function._dynamo_marked_constant = True  # pyright",
        "    torch.compiler.assume_constant_result(function)  # pyright",
        "test_house.py::test_neither_an_import_nor_a_call_loads_the_compiler",
    ),
    Bug(
        "products: the common shape of shapes of different lengths",
        "linalg/products.py",
        "(1,) * (rank - len(shape)) + tuple(shape)",
        "tuple(shape) + (1,) * (rank - len(shape))",
        "test_house.py::test_common_shapes_are_those_of_torch",
    ),
    Bug(
        "errors: a trace of TorchScript records constants",
        "recipe.py",
        "    errors.refuse_trace()",
        "    pass",
        "test_transforms.py::test_torchscript_is_refused_before_anything_runs[less]",
    ),
    Bug(
        "order: the largest value first at either end",
        "layers/eigenvectors.py",
        "    return largest if descending is None else descending\n",
        "    return True if descending is None else descending\n",
        "test_order.py::test_the_requested_end_is_first[ied-smallest-torch.float64] "
        "test_order.py::test_the_requested_end_is_first[isvd-smallest-torch.float64]",
    ),
    Bug(
        "order: triplets by products have their own",
        "layers/triplets.py",
        "return found if largest else tuple(x.flip(-1) for x in found)",
        "return found",
        "test_order.py::test_the_requested_end_is_first[isvd, operator-largest-torch.float64]",
    ),
]
BUGS += SURFACE
HESSIAN = [
    Bug(
        "hessian: buffers of a module are written to",
        "operators/hessian.py",
        "None if x is None else x.clone()",
        "x",
        "test_hessian.py::test_parameters_of_a_module_get_gradients_and_nothing_else_changes",
    ),
    Bug(
        "hessian: third derivatives that torch computes wrongly are returned",
        "operators/hessian.py",
        "other._is_differentiated = True",
        "other._is_differentiated = False",
        "test_hessian.py::test_third_derivatives_that_torch_computes_wrongly_are_an_error",
    ),
    Bug(
        "hessian: parameters that require a gradient are constants",
        "operators/hessian.py",
        "x if recorded and x.requires_grad else _leaf(x)",
        "_leaf(x)",
        "test_hessian.py::test_gradients_of_the_largest_eigenvalue_against_differences",
    ),
]
BUGS += HESSIAN
EXPLAINED = "test_explain.py::test_a_call_does_what_it_is_said_to_do"
EXPLAIN = [
    Bug(
        "explain: steps do not change the shapes that a solver sees",
        "recipe.py",
        "given = step.outline(given)",
        "pass",
        f"{EXPLAINED}[nullspace] {EXPLAINED}[nullspace-complex] {EXPLAINED}[isvd-wide]",
    ),
    Bug(
        "explain: a start that is drawn has a cached recipe",
        "explanation.py",
        "if kind in _SHORT and not drawn:",
        "if kind in _SHORT:",
        f"{EXPLAINED}[ied-generator]",
    ),
    Bug(
        "explain: pooling asks for one vector without a dimension",
        "explanation.py",
        "(ied, (moments, pool.k or 1), {})",
        "(ied, (moments, pool.k), {})",
        f"{EXPLAINED}[pool-tokens] {EXPLAINED}[pool-products]",
    ),
    Bug(
        "explain: Adaptive() tells of power steps on any matrix",
        "solvers/adaptive.py",
        "if self.takes_power(work, n) and k == 1 if symmetric else work >= self.general_from:",
        "if symmetric or work >= self.general_from:",
        "test_explain.py::test_attempts_are_those_that_are_made",
    ),
    Bug(
        "explain: a solver that was asked for has the reason of another",
        "executors/direct.py",
        "        if isinstance(solver, Auto):\n            _, solver, why",
        "        if True:\n            _, _, why",
        "test_explain.py::test_a_solver_and_a_rule_of_the_user",
    ),
    Bug(
        "explain: numbers are looked at",
        "explanation.py",
        "return function, {name: standing_for(x) for name, x in named.items()}",
        "return function, named",
        "test_explain.py::test_shapes_are_enough "
        "test_explain.py::test_nothing_is_looked_at_or_drawn",
    ),
]
BUGS += EXPLAIN
