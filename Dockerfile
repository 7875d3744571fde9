FROM python:3.11-slim
COPY . /src
RUN pip install --no-cache-dir '/src[metrics,quantize]' && rm -rf /src
ENTRYPOINT ["weightbus"]
