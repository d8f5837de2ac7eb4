LOADERS = {}


def register_model_loader(load_format):
    def register(loader):
        LOADERS[load_format] = loader
        return loader

    return register
