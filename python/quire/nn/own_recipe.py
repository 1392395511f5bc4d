"""The recipe that a layer has itself, for calls outside of every quire.autocast."""

import torch

from quire.recipe import Recipe, as_recipe


def own_recipe(what: str, recipe: object) -> Recipe | None:
    """as_recipe() of a layer's own recipe. Also raises ValueError for delayed scaling."""
    found = as_recipe(what, recipe)
    if found is not None and found.delayed():
        raise ValueError(
            f"{what}: a layer's own recipe cannot be {type(found).__name__}, whose scales change on entering "
            "quire.autocast. Leave recipe None and run the model within quire.autocast(recipe=...)"
        )
    return found


class HasRecipe(torch.nn.Module):
    """A module with an attribute `recipe`. What is assigned can be a recipe, its name or its text, or None for high
    precision. Raises what own_recipe() raises, and then keeps the old recipe."""

    #: What is read in each call: a graph would need more guards for the property.
    own_recipe: Recipe | None = None

    @property
    def recipe(self) -> Recipe | None:
        return self.own_recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | str | None) -> None:
        self.own_recipe = own_recipe(f"quire.{type(self).__name__}.recipe", recipe)

    def _recipe_text(self) -> str:
        """What extra_repr() says of it."""
        return "" if self.recipe is None else f", recipe={type(self.recipe).__name__}"
