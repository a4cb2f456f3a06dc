import java.util.stream.*;

public class Main {
  public static void main(String[] args) { System.out.println(IntStream.range(0, 100000).parallel().asLongStream().sum()); }
}
