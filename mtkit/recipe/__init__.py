"""The recipe of an experiment: its settings and the functions that read them."""

from mtkit.recipe.model import AttentionSettings as AttentionSettings
from mtkit.recipe.model import ModelSettings as ModelSettings
from mtkit.recipe.recipe import Recipe as Recipe
from mtkit.recipe.recipe import differences as differences
from mtkit.recipe.recipe import load_recipe as load_recipe
from mtkit.recipe.recipe import make_recipe as make_recipe
from mtkit.recipe.recipe import merged as merged
from mtkit.recipe.recipe import overridden as overridden
from mtkit.recipe.recipe import recipe_settings as recipe_settings
from mtkit.recipe.settings import DecodingSettings as DecodingSettings
from mtkit.recipe.settings import TrainingSettings as TrainingSettings
